// The functions that Python calls, for float32 (_f32) and bfloat16 (_bf16). Attention has two
// dtypes: of what a layer computes in, then of the cache. Products have two: of what comes in, then
// of what comes out.

#include "attend_tile.h"
#include "elementwise.h"
#include "linear.h"

template <class T, class C>
static void attend(Team* team, const Layer& layer, const Step& step, const Tokens<T>& a,
                   float* scratch, int64_t scratch_stride) {
  write_tokens<T, C>(team, layer, step, a);
  const int64_t work = step.num_items * layer.kv_heads;
  const auto query = [&](int64_t number, int64_t index) {
    const Item& item = step.items[number / layer.kv_heads];
    return Query{item.row, item.first + index, number % layer.kv_heads};
  };
  together(team, true, work, [&](int64_t number, int64_t thread, const auto& next) {
    float* mine = scratch + thread * scratch_stride;
    const Item& item = step.items[number / layer.kv_heads];
    if (item.form != kFew)
      return attend_tile<T, C>(layer, step, a, item, number % layer.kv_heads, mine);
    // What is given out next is likely this thread's.
    const int64_t after = next.load();
    const bool known = after < work && step.items[after / layer.kv_heads].form == kFew;
    const Query soon = known ? query(after, 0) : Query{};
    for (int64_t i = 0; i < item.count; i++)
      attend_one<T, C>(layer, step, a, query(number, i), known && i + 1 == item.count ? &soon : nullptr,
                       mine);
  });
}

template <class P>
static P* at(int64_t address) {
  return reinterpret_cast<P*>(address);
}

extern "C" {

// A team that is never taken down: its threads sleep when nobody calls.
Team* new_team(int64_t threads) { return new Team(threads); }

// Floats that each thread needs for `attend`, in whole vectors, and queries of one tile.
int64_t scratch_floats(const Layer* layer) {
  const int64_t few = FewRoom::floats(*layer), tile = TileRoom::floats(*layer);
  return ((few > tile ? few : tile) + 2 * kLanes - 1) / kLanes * kLanes;
}
int64_t tokens_of_a_tile(const Layer* layer) { return tile_tokens(*layer); }

// float32 elements of scratch that a product of so many rows, `width` elements each, needs. They
// begin where a line of the cache does.
int64_t turned_f32(const Team* team, int64_t rows, int64_t width) {
  return team->threads() * turned_words<float>(rows, width, team->threads());
}
int64_t turned_bf16(const Team* team, int64_t rows, int64_t width) {
  return team->threads() * turned_words<BFloat16>(rows, width, team->threads());
}

// A call of any of the functions below: all of them take integers and addresses in an array, so that
// calls can be kept and repeated.
struct Call {
  void (*function)(const int64_t*);
  const int64_t* arguments;
};
void repeat(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].arguments);
}

// Arguments: team, x, w, bias, y, M, N, K, x_stride, y_stride, scratch.
#define LINEAR(NAME, GATED, T, Y)                                                                \
  void NAME(const int64_t* a) {                                                                  \
    linear<GATED, T, Y>(at<Team>(a[0]), {at<T>(a[1]), at<T>(a[2]), at<T>(a[3]), at<Y>(a[4]),     \
                                         a[5], a[6], a[7], a[8], a[9], at<float>(a[10])});       \
  }
// Arguments: team, x, residual, gain, out, rows, width, the bits of eps.
#define RMS_NORM(NAME, T)                                                                        \
  void rms_norm_##NAME(const int64_t* a) {                                                       \
    float eps;                                                                                   \
    std::memcpy(&eps, &a[7], sizeof(eps));                                                       \
    rms_norm<T>(at<Team>(a[0]), at<T>(a[1]), at<T>(a[2]), at<T>(a[3]), at<T>(a[4]), a[5], a[6],  \
                eps);                                                                            \
  }
// Arguments: team, gate_up, out, rows, width.
#define GATED(NAME, T)                                                      \
  void gated_##NAME(const int64_t* a) {                                     \
    gated<T>(at<Team>(a[0]), at<T>(a[1]), at<T>(a[2]), a[3], a[4]);         \
  }
// Arguments: x, numbers, out, rows, width.
#define TAKE_ROWS(NAME, T)                                                    \
  void take_rows_##NAME(const int64_t* a) {                                   \
    take_rows<T>(at<T>(a[0]), at<int64_t>(a[1]), at<T>(a[2]), a[3], a[4]);    \
  }
// Arguments: team, x, cosines, sines, rows, heads, width, stride.
#define ROTATE(NAME, T)                                                                         \
  void rotate_##NAME(const int64_t* a) {                                                        \
    rotate<T>(at<Team>(a[0]), at<T>(a[1]), at<T>(a[2]), at<T>(a[3]), a[4], a[5], a[6], a[7]);   \
  }
// Arguments: team, layer, step, tokens, scratch, floats of scratch per thread.
#define ATTENTION(NAME, T, C)                                                                   \
  void attend_##NAME(const int64_t* a) {                                                        \
    attend<T, C>(at<Team>(a[0]), *at<Layer>(a[1]), *at<Step>(a[2]), *at<Tokens<T>>(a[3]),       \
                 at<float>(a[4]), a[5]);                                                        \
  }
#define FOR_DTYPE(NAME, T) RMS_NORM(NAME, T) GATED(NAME, T) TAKE_ROWS(NAME, T) ROTATE(NAME, T)

LINEAR(linear_f32_f32, false, float, float)
LINEAR(linear_bf16_bf16, false, BFloat16, BFloat16)
LINEAR(linear_bf16_f32, false, BFloat16, float)
LINEAR(linear_gated_f32, true, float, float)
LINEAR(linear_gated_bf16, true, BFloat16, BFloat16)
FOR_DTYPE(f32, float)
FOR_DTYPE(bf16, BFloat16)
ATTENTION(f32_f32, float, float)
ATTENTION(f32_bf16, float, BFloat16)
ATTENTION(bf16_f32, BFloat16, float)
ATTENTION(bf16_bf16, BFloat16, BFloat16)
}
