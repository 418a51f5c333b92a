// The part of the simulated device that knows nothing of torch: streams, marks, contexts, memory that the host cannot touch.
//
// A stream is a thread with a queue. Work is done in order within a stream; between streams only marks give an order. Each
// piece of work can be delayed: work that does not wait for a mark reads too early then. The device's memory is mapped twice: the
// address that tensors have is not accessible, so an access by the host raises SIGSEGV; streams use the second mapping.
#pragma once

#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace sim {

constexpr int kNumDevices = 2;
constexpr int kNumPooled = 32;  // CUDA's pool has as many: the 33rd stream that is asked for is the first again
constexpr size_t kArenaBytes = size_t{32} << 30;
constexpr unsigned char kReleased = 0xA7, kFresh = 0xB9;  // released; allocated, not yet written

using Clock = std::chrono::steady_clock;

inline std::atomic<bool> any_started{false};  // whether a stream's thread was started in this process
inline std::atomic<bool> forked{false};       // whether this is a child of such a process: its locks may be held for ever

struct Settings {
  std::atomic<int64_t> delay_ns{0};        // before each piece of work
  std::atomic<int64_t> refuse_copy{0};     // the n-th copy from now is refused when it is submitted; 0: none
  std::atomic<int64_t> fail_copy{0};       // the n-th copy from now fails when it is executed; 0: none
  std::atomic<bool> refuse_pinning{false};
  std::atomic<bool> fills{true};  // whether memory is filled when it is allocated and released
  std::atomic<int64_t> num_copies{0};
  std::atomic<int64_t> released_ns{0};  // how long a call sleeps that releases the GIL; see `Released`
};
inline Settings settings;

// Of the interpreter, which has loaded this library.
extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

// The time of a call of torch for CUDA that releases the GIL. It sleeps, so that a thread that waits for the GIL has a processor
// and takes it. On an H200 with 16 processors nearly each such call lost the GIL to a busy thread, for a switch interval.
class Released {
 public:
  // Where torch's generic call holds the GIL, and CUDA's does not, `releases` is true. Where both hold it, nothing is done.
  explicit Released(bool releases = false) {
    if (depth_++ || forked) return;
    const bool holds = PyGILState_Check();
    if (holds && !releases) return;
    if (holds) state_ = PyEval_SaveThread();
    if (const auto time = settings.released_ns.load()) std::this_thread::sleep_for(std::chrono::nanoseconds(time));
  }
  ~Released() {
    if (state_) PyEval_RestoreThread(state_);
    --depth_;
  }
  Released(const Released&) = delete;

 private:
  inline static thread_local int depth_ = 0;  // an operator calls others, and torch releases the GIL once for all of them
  void* state_ = nullptr;
};

inline void require_parent() {
  if (forked) throw std::runtime_error("the simulated device cannot be used in a forked child of a process that used it");
}

// Contexts: a process has one on a device from the first call that needs it. An index that is set lazily makes none.

inline std::atomic<bool> contexts[kNumDevices];
inline thread_local int current_device = 0;

inline void require_device(int64_t device) {
  if (device < 0 || device >= kNumDevices) throw std::runtime_error("there is no simulated device " + std::to_string(device));
}

inline void make_context(int device) {
  require_parent();
  require_device(device);
  contexts[device] = true;
}

class Stream {
 public:
  Stream(int device, int64_t id) : device(device), id(id) {}

  const int device;
  const int64_t id;

  // Queue a piece of work; return how many were queued so far.
  uint64_t put(std::function<void()> work, bool delayed) {
    require_parent();
    const auto delay = std::chrono::nanoseconds(delayed ? settings.delay_ns.load() : 0);
    std::lock_guard lock(mutex_);
    if (!started_) {
      std::thread([this] { run(); }).detach();  // throws where there can be no more threads
      started_ = true;
      any_started = true;
    }
    work_.push_back([work = std::move(work), delay] {
      if (delay.count()) std::this_thread::sleep_for(delay);
      work();
    });
    changed_.notify_all();
    return ++num_queued_;
  }

  uint64_t num_queued() {
    require_parent();
    std::lock_guard lock(mutex_);
    return num_queued_;
  }

  // Whether the first `count` pieces are done. Throws if one of them failed.
  bool passed(uint64_t count) {
    require_parent();
    std::lock_guard lock(mutex_);
    raise_failure(count);
    return num_done_ >= count;
  }

  void wait(uint64_t count) {
    require_parent();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_done_ >= count; });
    raise_failure(count);
  }

  void wait_all() { wait(num_queued()); }

  void clear_failure() {
    std::lock_guard lock(mutex_);
    first_failed_ = 0;
  }

 private:
  void raise_failure(uint64_t count) {
    if (first_failed_ && first_failed_ <= count && num_done_ >= first_failed_) throw std::runtime_error(failure_);
  }

  void run() {
    pthread_setname_np(pthread_self(), "sim-stream");  // tests that count threads leave it out
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !work_.empty(); });
      auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      std::string failure;
      try {
        work();
      } catch (const std::exception& error) {
        failure = error.what();
      }
      work = nullptr;
      lock.lock();
      ++num_done_;
      if (!failure.empty() && !first_failed_) {
        first_failed_ = num_done_;
        failure_ = failure;
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t num_queued_ = 0, num_done_ = 0, first_failed_ = 0;
  std::string failure_;
  bool started_ = false;
};

// A place in a stream: behind what was queued when the mark was made.
struct Mark {
  Stream* stream = nullptr;
  uint64_t count = 0;
  std::shared_ptr<std::atomic<int64_t>> time_ns;  // when it was passed; for elapsed times

  bool passed() const { return !stream || stream->passed(count); }
  void wait() const {
    if (stream) stream->wait(count);
  }
};

inline Mark mark(Stream* stream) {
  auto time_ns = std::make_shared<std::atomic<int64_t>>(0);
  const auto count = stream->put([time_ns] { *time_ns = Clock::now().time_since_epoch().count(); }, false);
  return {stream, count, time_ns};
}

inline Mark place(Stream* stream) { return {stream, stream->num_queued(), nullptr}; }

inline void block(Stream* stream, const Mark& mark) {
  if (mark.stream && mark.stream != stream) stream->put([mark] { mark.wait(); }, false);
}

// Number 0 is the default stream, 1 to 32 the pool's.
struct Streams {
  std::unique_ptr<Stream> all[kNumPooled + 1];
  std::atomic<unsigned> num_taken{0};

  explicit Streams(int device) {
    for (int id = 0; id <= kNumPooled; ++id) all[id] = std::make_unique<Stream>(device, id);
  }
};

inline Streams& streams(int device) {
  require_device(device);
  static auto* const made = new std::unique_ptr<Streams>[kNumDevices]{std::make_unique<Streams>(0), std::make_unique<Streams>(1)};
  return *made[device];
}

inline Stream* pooled_stream(int device) {
  make_context(device);
  return streams(device).all[1 + streams(device).num_taken++ % kNumPooled].get();
}

inline Stream* stream_number(int device, int64_t id) {
  if (id < 0 || id > kNumPooled) throw std::runtime_error("there is no stream " + std::to_string(id));
  return streams(device).all[id].get();
}

inline thread_local int64_t current_stream_ids[kNumDevices] = {0, 0};

inline Stream* current_stream(int device) { return streams(device).all[current_stream_ids[device]].get(); }

inline void synchronize(int device) {
  make_context(device);
  for (auto& stream : streams(device).all) stream->wait_all();
}

// The address space of a device. What a range holds is written and read by way of `reach`.
class Arena {
 public:
  Arena() {
    const int file = memfd_create("simulated device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kArenaBytes)) throw std::runtime_error("no memory for a simulated device");
    seen_ = map(file, PROT_NONE);
    used_ = map(file, PROT_READ | PROT_WRITE);
    madvise(used_, kArenaBytes, MADV_DONTFORK);
    file_ = file;
    free_[0] = kArenaBytes;
  }

  char* take(size_t nbytes) {
    for (auto found = free_.begin(); found != free_.end(); ++found) {
      const auto [start, length] = *found;
      if (length < nbytes) continue;
      free_.erase(found);
      if (length > nbytes) free_[start + nbytes] = length - nbytes;
      return seen_ + start;
    }
    throw std::runtime_error("no addresses are left on a simulated device");
  }

  void give_back(char* address, size_t nbytes) {
    size_t start = address - seen_, length = nbytes;
    const size_t page = 4096, first = (start + page - 1) / page * page, last = (start + length) / page * page;
    if (first < last) fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
    auto next = free_.lower_bound(start);
    if (next != free_.end() && next->first == start + length) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == start) {
        before->second += length;
        return;
      }
    }
    free_[start] = length;
  }

  bool holds(const void* address) const { return address >= seen_ && address < seen_ + kArenaBytes; }
  char* reach(const void* address) const { return used_ + (static_cast<const char*>(address) - seen_); }

 private:
  static char* map(int file, int protection) {
    void* const found = mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (found == MAP_FAILED) throw std::runtime_error("no addresses for a simulated device");
    return static_cast<char*>(found);
  }

  int file_;
  char *seen_, *used_;
  std::map<size_t, size_t> free_;
};

inline Arena& arena(int device) {
  static auto* const made = new Arena[kNumDevices];
  return made[device];
}

// Where the streams find what tensors have at an address of a device.
inline char* reach(const void* address) {
  for (int device = 0; device < kNumDevices; ++device)
    if (arena(device).holds(address)) return arena(device).reach(address);
  throw std::runtime_error("not an address of a simulated device");
}

}  // namespace sim
