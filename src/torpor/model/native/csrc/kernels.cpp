// The functions that Python calls, for float32 (_f32) and bfloat16 (_bf16). Attention has two
// dtypes: of what a layer computes in, then of the cache.

#include "attend_tile.h"
#include "elementwise.h"
#include "linear_many.h"

template <class T, class C>
static void attend(Team* team, const Layer& layer, const Step& step, const Tokens<T>& a,
                   float* scratch, int64_t scratch_stride) {
  write_tokens<T, C>(team, layer, step, a);
  const int64_t work = step.num_items * layer.kv_heads;
  together(team, true, work, [&](int64_t number, int64_t thread, const auto&) {
    float* mine = scratch + thread * scratch_stride;
    const Item& item = step.items[number / layer.kv_heads];
    const int64_t head = number % layer.kv_heads;
    if (item.form != kFew) return attend_tile<T, C>(layer, step, a, item, head, mine);
    for (int64_t index = item.first; index < item.first + item.count; index++)
      attend_one<T, C>(layer, step, a, item.row, index, head, mine);
  });
}

// `alike`: a row has the same bits whatever the number of rows.
static void multiply(Team* team, const Linear<float>& a, bool alike) {
  if (a.M >= kManyRows && !alike) return linear_many(team, a);
  linear(team, a);
}
static void multiply(Team* team, const Linear<BFloat16>& a, bool) { linear(team, a); }

extern "C" {

// A team that is never taken down: its threads sleep when nobody calls.
Team* new_team(int64_t threads) { return new Team(threads); }

// Floats that each thread needs for `attend`, and queries of one tile.
int64_t scratch_floats(const Layer* layer) {
  const int64_t few = FewRoom::floats(*layer), tile = TileRoom::floats(*layer);
  return (few > tile ? few : tile) + kLanes;
}
int64_t tokens_of_a_tile(const Layer* layer) { return tile_tokens(*layer); }

#define FUNCTIONS(NAME, T)                                                                        \
  void linear_##NAME(Team* team, const T* x, const T* w, const T* bias, T* y, int64_t m,    \
                     int64_t n, int64_t k, int64_t x_stride, int64_t y_stride, int64_t alike) {   \
    multiply(team, Linear<T>{x, w, bias, y, m, n, k, x_stride, y_stride}, alike);                 \
  }                                                                                               \
  void rms_norm_##NAME(Team* team, const T* x, T* residual, const T* gain, T* out,          \
                       int64_t rows, int64_t width, float eps) {                                  \
    rms_norm(team, x, residual, gain, out, rows, width, eps);                                     \
  }                                                                                               \
  void gated_##NAME(Team* team, const T* gate_up, T* out, int64_t rows, int64_t width) {    \
    gated(team, gate_up, out, rows, width);                                                       \
  }                                                                                               \
  void rotate_##NAME(Team* team, T* x, const T* cosines, const T* sines, int64_t rows,      \
                     int64_t heads, int64_t width, int64_t stride) {                              \
    rotate(team, x, cosines, sines, rows, heads, width, stride);                                  \
  }

#define ATTENTION(NAME, T, C)                                                                     \
  void attend_##NAME(Team* team, const Layer* layer, const Step* step, const Tokens<T>* a,  \
                     float* scratch, int64_t scratch_stride) {                                    \
    attend<T, C>(team, *layer, *step, *a, scratch, scratch_stride);                               \
  }

FUNCTIONS(f32, float)
FUNCTIONS(bf16, BFloat16)
ATTENTION(f32_f32, float, float)
ATTENTION(f32_bf16, float, BFloat16)
ATTENTION(bf16_f32, BFloat16, float)
ATTENTION(bf16_bf16, BFloat16, BFloat16)
}
