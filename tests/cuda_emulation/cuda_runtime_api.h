// Stands in for CUDA's header when the kernels of csrc/kernels/cuda are compiled for the CPU: it runs every thread of a
// block as a fiber, and the blocks one after the other. A fiber runs until it waits at a barrier or in a shuffle, or
// ends; so a run repeats itself exactly. What CUDA leaves undefined and is cheap to see makes the launch fail with a
// message:
//   - threads of a block that wait at different barriers, or lanes of a warp in different shuffles
//   - a barrier or shuffle that a thread which has not ended never reaches
//   - a shuffle with less than the full mask, or one that reads a lane which takes no part
//   - more dynamic shared memory than a block may have
// What tensor cores do is emulated in kernels/cuda/tensor_core.cuh beside this file, which is found before the one of
// csrc. The sources must have gone through rewrite.py: launches and dynamic shared memory are no C++.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

using std::isfinite;
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulation {

using Place = std::source_location;
constexpr int kWarpSize = 32;
constexpr int kStackBytes = 64 * 1024;
constexpr std::int64_t kMostSharedBytes =
    99 * 1024;  // what a block may have on the smallest of the architectures we build for

/// A copy into shared memory that has begun; it is done when its thread waits for it, no sooner.
struct Copy {
  void* to;
  const void* from;  ///< null: zeros
  int bytes;
};

/// A fiber starts by setcontext, for a stack of its own; later switches go by _setjmp and _longjmp, which make no
/// system calls.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false;
  std::unique_ptr<char[]> stack;
  dim3 index;
  bool waits = false, ended = false;
  std::vector<std::vector<Copy>> copies;  ///< groups, the last of them not committed
};

/// Threads that wait for each other: those of a block, or of a warp.
struct Meeting {
  int first = 0, size = 0;  ///< the threads [first, first + size)
  int live = 0, arrived = 0;
  Place place;  ///< where the first of them waits
};

/// The values that lanes show each other: two sets by turns, for a lane may be at the next shuffle while others still
/// read.
struct Warp {
  Meeting meeting;
  unsigned char values[2][kWarpSize][16];
  std::uint32_t present[2] = {0, 0};
  bool turn[kWarpSize] = {};
};

/// The block that runs.
struct Block {
  dim3 grid, size, index;
  std::function<void()> body;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting barrier;
  int current = -1;
  jmp_buf scheduler;
  std::string error;  ///< of the last launch that failed
};
inline Block block;
alignas(64) inline char shared_bytes[kMostSharedBytes];

inline std::string name_of(const Place& place) {
  const std::string path = place.file_name();
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(place.line()) + " in " + place.function_name();
}

/// The launch fails: the message is kept, and no thread of it goes on.
inline void fail(const std::string& message) {
  if (block.error.empty()) block.error = message;
}

[[gnu::noinline]] inline void back_to_scheduler() {
  if (_setjmp(block.fibers[block.current].place) == 0) _longjmp(block.scheduler, 1);
}

/// Runs a fiber until it calls back_to_scheduler.
[[gnu::noinline]] inline void resume(Fiber& fiber) {
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

/// Lets the threads of a meeting go on once all that have not ended are there.
inline void open_if_complete(Meeting& meeting) {
  if (meeting.arrived == 0 || meeting.arrived < meeting.live) return;
  meeting.arrived = 0;
  for (int t = meeting.first; t < meeting.first + meeting.size; ++t) block.fibers[t].waits = false;
}

inline void meet(Meeting& meeting, const char* what, const Place& place) {
  if (meeting.arrived == 0) {
    meeting.place = place;
  } else if (meeting.place.line() != place.line() || std::strcmp(meeting.place.file_name(), place.file_name()) != 0) {
    fail(std::string("threads meet at different ") + what + "s: " + name_of(meeting.place) + " and " + name_of(place));
    back_to_scheduler();
  }
  ++meeting.arrived;
  block.fibers[block.current].waits = true;
  open_if_complete(meeting);
  if (block.fibers[block.current].waits) back_to_scheduler();
}

inline void run_thread() {
  block.body();
  Warp& warp = block.warps[block.current / kWarpSize];
  block.fibers[block.current].ended = true;
  --block.barrier.live;
  --warp.meeting.live;
  open_if_complete(block.barrier);
  open_if_complete(warp.meeting);
  back_to_scheduler();
}

inline void start_thread(int t) {
  Fiber& fiber = block.fibers[t];
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  fiber.index = dim3(t, 0, 0);
  fiber.started = fiber.waits = fiber.ended = false;
  fiber.copies.assign(1, {});
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_thread, 0);
}

inline void start_block(int threads) {
  block.fibers.resize(threads);
  block.warps.assign((threads + kWarpSize - 1) / kWarpSize, Warp());
  block.barrier = {0, threads, threads, 0, {}};
  for (int w = 0; w < static_cast<int>(block.warps.size()); ++w) {
    const int first = w * kWarpSize, size = std::min(threads - first, kWarpSize);
    block.warps[w].meeting = {first, size, size, 0, {}};
  }
  for (int t = 0; t < threads; ++t) start_thread(t);
}

/// Says at which barrier or shuffle threads wait that never come all.
inline void fail_stuck() {
  for (const Warp& warp : block.warps)
    if (warp.meeting.arrived > 0)
      fail("shuffle that only " + std::to_string(warp.meeting.arrived) + " of " + std::to_string(warp.meeting.live) +
           " live lanes of a warp reach: " + name_of(warp.meeting.place));
  fail("barrier that only " + std::to_string(block.barrier.arrived) + " of " + std::to_string(block.barrier.live) +
       " live threads of a block reach: " + name_of(block.barrier.place));
}

inline void run_block() {
  const int threads = static_cast<int>(block.size.x);
  start_block(threads);
  while (block.barrier.live > 0 && block.error.empty()) {
    bool any = false;
    for (int t = 0; t < threads && block.error.empty(); ++t) {
      if (block.fibers[t].ended || block.fibers[t].waits) continue;
      any = true;
      block.current = t;
      resume(block.fibers[t]);
    }
    if (!any) fail_stuck();
  }
}

/// What rewrite.py makes of kernel<<<grid, threads, bytes, stream>>>(arguments).
class Launch {
 public:
  Launch(dim3 grid, unsigned threads, std::int64_t bytes, cudaStream_t)
      : grid_(grid), threads_(threads), bytes_(bytes) {}

  template <class Kernel, class... Arguments>
  void operator()(const Kernel& kernel, const Arguments&... arguments) const {
    if (bytes_ > kMostSharedBytes) fail("a launch asks for " + std::to_string(bytes_) + " bytes of shared memory");
    if (threads_ == 0 || threads_ > 1024) fail("a launch asks for " + std::to_string(threads_) + " threads a block");
    block.grid = grid_;
    block.size = dim3(threads_);
    block.body = [&] { kernel(arguments...); };
    for (unsigned y = 0; y < grid_.y && block.error.empty(); ++y)
      for (unsigned x = 0; x < grid_.x && block.error.empty(); ++x) {
        std::memset(shared_bytes, 0xff, sizeof shared_bytes);  // NaN: what a block has not written
        block.index = dim3(x, y, 0);
        run_block();
      }
  }

 private:
  dim3 grid_;
  unsigned threads_;
  std::int64_t bytes_;
};

using Shown = unsigned char (*)[16];

/// Shows the other lanes a value and gets theirs, which stay until the lane shows its next but one; every live lane of
/// the warp calls this. `present`: which do.
template <class T>
Shown show(const T& value, const char* what, const Place& place, std::uint32_t& present) {
  static_assert(sizeof(T) <= 16);
  const int lane = block.current % kWarpSize;
  Warp& warp = block.warps[block.current / kWarpSize];
  const int turn = warp.turn[lane] = !warp.turn[lane];
  if (warp.meeting.arrived == 0) warp.present[turn] = 0;
  warp.present[turn] |= 1u << lane;
  std::memcpy(warp.values[turn][lane], &value, sizeof(T));
  meet(warp.meeting, what, place);
  present = warp.present[turn];
  return warp.values[turn];
}

/// The value of lane `from`.
template <class T>
T value_of_lane(unsigned mask, T value, int from, const Place& place) {
  if (mask != 0xffffffffu) fail("shuffle with a mask that is not full: " + name_of(place));
  std::uint32_t present = 0;
  const Shown shown = show(value, "shuffle", place, present);
  const bool inside = from >= 0 && from < kWarpSize && (present >> from & 1) != 0;
  if (!inside) {
    fail("shuffle that reads lane " + std::to_string(from) + ", which takes no part: " + name_of(place));
    back_to_scheduler();
  }
  std::memcpy(&value, shown[from], sizeof(T));
  return value;
}

inline int lane() { return block.current % kWarpSize; }

}  // namespace emulation

#define threadIdx (emulation::block.fibers[emulation::block.current].index)
#define blockIdx (emulation::block.index)
#define blockDim (emulation::block.size)
#define gridDim (emulation::block.grid)

inline const char* cudaGetErrorString(cudaError_t) { return emulation::block.error.c_str(); }
inline cudaError_t cudaGetLastError() { return emulation::block.error.empty() ? cudaSuccess : cudaErrorLaunchFailure; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(const Kernel&, int, int) {
  return cudaSuccess;
}

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline void __syncthreads(const emulation::Place place = emulation::Place::current()) {
  emulation::meet(emulation::block.barrier, "barrier", place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, const emulation::Place place = emulation::Place::current()) {
  return emulation::value_of_lane(mask, value, emulation::lane() ^ bits, place);
}
/// Among groups of `width` lanes: the group's lane `from`.
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = emulation::kWarpSize,
              const emulation::Place place = emulation::Place::current()) {
  if (from < 0 || from >= width)
    emulation::fail("shuffle from lane " + std::to_string(from) + " of " + std::to_string(width) + ": " +
                    emulation::name_of(place));
  return emulation::value_of_lane(mask, value, emulation::lane() / width * width + from, place);
}
/// Lanes that would read from outside keep their own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, int offset, const emulation::Place place = emulation::Place::current()) {
  const int from = emulation::lane() - offset;
  return emulation::value_of_lane(mask, value, from >= 0 ? from : emulation::lane(), place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int offset, const emulation::Place place = emulation::Place::current()) {
  const int from = emulation::lane() + offset;
  return emulation::value_of_lane(mask, value, from < emulation::kWarpSize ? from : emulation::lane(), place);
}
