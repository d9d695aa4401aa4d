// Work shared by the threads that torch computes with: its own OpenMP runtime, handed in by address.
//
// A second runtime beside it would fight for the same processors.

#pragma once

#include <atomic>

struct Team {
  // The entry point of the GNU OpenMP interface, which every OpenMP runtime has.
  void (*parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
  int (*thread_num)();
  int64_t threads;
};

// Calls work(thread, threads) on each thread; alone where the work is too little to share.
template <class Work>
static void together(const Team* team, bool worth_it, Work work) {
  struct Job {
    Work* work;
    const Team* team;
    static void run(void* data) {
      Job* job = static_cast<Job*>(data);
      (*job->work)(static_cast<int64_t>(job->team->thread_num()), job->team->threads);
    }
  };
  if (!worth_it || team->threads == 1) {
    work(int64_t{0}, int64_t{1});
    return;
  }
  Job job{&work, team};
  team->parallel(&Job::run, &job, static_cast<unsigned>(team->threads), 0);
}
