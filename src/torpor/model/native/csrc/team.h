// Threads that share the work of one call, as far as they get to it.
//
// The caller never waits for a thread that has not begun: on a machine that is shared, a thread
// without a processor costs a part of the speed, where the barriers of OpenMP cost a time slice of
// the scheduler each. Nothing in a result depends on who computed it, as long as nobody changes how
// the calling thread treats numbers that are too small.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

INLINE void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int64_t kMaxParts = 32;

class Team {
 public:
  // `threads` counts the caller. Fewer if the system gives no more.
  explicit Team(int64_t threads) {
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the interpreter's
    try {
      for (int64_t i = 1; i < threads; i++) {
        std::thread([this, i] { help(i); }).detach();
        helpers_++;
      }
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  int64_t threads() const { return helpers_ + 1; }

  // Calls work(data, thread) here as thread 0, and on the others until this one returns.
  void run(void (*work)(void*, int64_t), void* data) {
    // Another caller, or a fork while there was one: then alone.
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!helpers_ || !turn.owns_lock()) return work(data, 0);
    work_ = work, data_ = data;
    gate_.store((generation_ += kGeneration) | kOpen, std::memory_order_release);
    calls_.fetch_add(1);
    calls_.notify_all();
    work(data, 0);
    gate_.fetch_and(~kOpen);
    for (int64_t spins = 0; gate_.load(std::memory_order_acquire) & kInside; spins++)
      spins < 1000 ? pause_briefly() : static_cast<void>(sched_yield());
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 31, kInside = kOpen - 1,
                            kGeneration = uint64_t{1} << 32;

  void help(int64_t thread) {
    uint64_t seen = 0;
    for (;;) {
      const uint32_t calls = calls_.load();
      const auto asleep_at = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
      bool entered = false;
      do {
        for (int i = 0; i < 64 && !entered; i++) {
          entered = enter(&seen);
          if (!entered) pause_briefly();
        }
      } while (!entered && std::chrono::steady_clock::now() < asleep_at);
      if (!entered) {
        calls_.wait(calls);
        continue;
      }
      work_(data_, thread);
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Whether there is work that this thread has not seen; if so, the caller waits for it.
  bool enter(uint64_t* seen) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    while ((gate & kOpen) && gate / kGeneration != *seen)
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
        *seen = gate / kGeneration;
        return true;
      }
    return false;
  }

  std::mutex turn_;
  void (*work_)(void*, int64_t) = nullptr;
  void* data_ = nullptr;
  uint64_t generation_ = 0;
  int64_t helpers_ = 0;
  alignas(64) std::atomic<uint64_t> gate_{0};  // number of the call, whether it is open, who is in
  alignas(64) std::atomic<uint32_t> calls_{0};
};

// Calls work(item, thread, next) for items 0 .. count - 1, each once, on the threads of a team; alone
// where there is too little to share. `next` is the item that is likely given out next to the same
// thread, to be looked at.
//
// Each thread begins with a part of its own, the items of which lie side by side, and helps the
// others when that is done. Work on the same rows of one result after another thus finds them in the
// cache of the processor that wrote them: to write what another one has just written takes several
// times as long.
template <class Work>
static void together(Team* team, bool worth_it, int64_t count, Work work) {
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Job {
    Work* work;
    int64_t parts;
    Part part[kMaxParts];
    static void run(void* data, int64_t thread) {
      Job* job = static_cast<Job*>(data);
      for (int64_t i = 0; i < job->parts; i++) {
        Part& part = job->part[(thread + i) % job->parts];
        for (int64_t item = part.next++; item < part.end; item = part.next++)
          (*job->work)(item, thread, part.next);
      }
    }
  };
  const bool shared = worth_it && count > 1;
  const int64_t threads = shared ? team->threads() : 1;
  Job job;
  job.work = &work;
  job.parts = threads < kMaxParts ? threads : kMaxParts;
  for (int64_t i = 0; i < job.parts; i++) {
    job.part[i].next.store(i * count / job.parts, std::memory_order_relaxed);
    job.part[i].end = (i + 1) * count / job.parts;
  }
  if (shared)
    team->run(&Job::run, &job);
  else
    Job::run(&job, 0);
}
