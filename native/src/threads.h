// One pool of threads for torch and for us.
#pragma once

namespace vera {

// Calls body(argument) on up to `num_threads` threads at once, the caller being one of them, and returns when all are done.
// Fewer threads may come than were asked for, so the body takes its work from a shared counter. It must not throw.
//
// The threads are those of the OpenMP runtime that torch has loaded: a second runtime would fight it for the cores. Where
// there is none, a pool of our own serves.
void run_parallel(int num_threads, void (*body)(void*), void* argument);

// Where the threads come from: the path of the OpenMP runtime's library, or "std::thread".
const char* threads_runtime();

}  // namespace vera
