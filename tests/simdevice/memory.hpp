// Memory of the simulated device, and pinned memory of the host. Both behave like torch's allocators for CUDA.
//
// Device memory belongs to the stream that was current when it was allocated: released, it is given out again under that stream
// at once, whatever other streams do with it, unless they were recorded. Pinned memory is given out again when the copies that
// were recorded for it are done. Both are filled with a pattern when they are allocated and released, in stream order.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <list>
#include <map>
#include <set>
#include <vector>

#include "runtime.hpp"

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

inline void fill_later(Stream* stream, void* address, size_t nbytes, unsigned char value) {
  if (!settings.fills) return;
  char* const reached = reach(address);
  stream->put([=] { std::memset(reached, value, nbytes); }, false);
}

inline bool all_passed(const std::vector<Mark>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](const Mark& mark) { return mark.passed(); });
}

struct Block {
  char* address;
  size_t nbytes;
  Stream* stream;
  std::set<Stream*> recorded;
  std::vector<Mark> until = {};  // released, but not to be given out before
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    const int device = current_device;
    const c10::Device where(kType, device);
    if (!wanted) return {nullptr, where};
    make_context(device);
    const size_t nbytes = (wanted + 511) / 512 * 512;
    Stream* const stream = current_stream(device);
    Block* block = nullptr;
    {
      std::lock_guard lock(mutex_);
      block = find(device, stream, nbytes);
      auto& pool = pools_[device];
      pool.used_bytes += block->nbytes;
      pool.peak_bytes = std::max(pool.peak_bytes, pool.used_bytes);
    }
    fill_later(stream, block->address, block->nbytes, kFresh);
    return {block->address, block, &DeviceMemory::release, where};
  }

  // A tensor on a part of an allocation, made by way of DLPack, has another deleter: nothing is recorded for it.
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (!ptr.get() || ptr.get_deleter() != &DeviceMemory::release) return;
    auto* const block = static_cast<Block*>(ptr.get_context());
    Stream* const other = stream_number(stream.device_index(), stream.id());
    require_parent();
    std::lock_guard lock(mutex_);
    if (other != block->stream) block->recorded.insert(other);
  }

  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    synchronize(current_device);
    std::memcpy(reach(target), reach(source), nbytes);
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard lock(mutex_);
    for (int device = 0; device < kNumDevices; ++device) flush(device);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    require_device(device);
    std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats found;
    for (auto* stat : {&found.allocated_bytes[0], &found.active_bytes[0], &found.requested_bytes[0]}) {
      stat->current = pools_[device].used_bytes;
      stat->peak = pools_[device].peak_bytes;
    }
    found.reserved_bytes[0].current = pools_[device].reserved_bytes;
    found.reserved_bytes[0].peak = pools_[device].peak_reserved_bytes;
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    require_device(device);
    std::lock_guard lock(mutex_);
    auto& pool = pools_[device];
    pool.peak_bytes = pool.used_bytes;
    pool.peak_reserved_bytes = pool.reserved_bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    make_context(device);
    std::lock_guard lock(mutex_);
    return {pools_[device].total_bytes - pools_[device].reserved_bytes, pools_[device].total_bytes};
  }

  void set_limit(int device, size_t bytes) {
    std::lock_guard lock(mutex_);
    pools_[device].limit_bytes = bytes;
  }
  size_t total_bytes(int device) const { return pools_[device].total_bytes; }

 private:
  struct Pool {
    std::map<Stream*, std::multimap<size_t, Block*>> cached;  // by size
    std::list<Block*> waiting;
    size_t used_bytes = 0, peak_bytes = 0, reserved_bytes = 0, peak_reserved_bytes = 0;
    size_t total_bytes = size_t{16} << 30, limit_bytes = size_t{16} << 30;
  };

  Block* find(int device, Stream* stream, size_t nbytes) {
    auto& pool = pools_[device];
    take_in(pool);
    auto& cached = pool.cached[stream];
    const auto best = cached.lower_bound(nbytes);
    if (best != cached.end() && best->first <= nbytes + nbytes / 4 + 4096) {
      Block* const found = best->second;
      cached.erase(best);
      return found;
    }
    const auto limit = std::min(pool.limit_bytes, pool.total_bytes);
    if (nbytes > limit || pool.reserved_bytes + nbytes > limit) flush(device);
    TORCH_CHECK_WITH(OutOfMemoryError, nbytes <= limit && pool.reserved_bytes + nbytes <= limit, "sim:", device,
                     " is out of memory: ", nbytes, " bytes were asked for, ", pool.reserved_bytes, " of ", limit, " are taken");
    pool.reserved_bytes += nbytes;
    pool.peak_reserved_bytes = std::max(pool.peak_reserved_bytes, pool.reserved_bytes);
    return new Block{arena(device).take(nbytes), nbytes, stream, {}};
  }

  static void release(void* context);

  void put_back(Block* block) {
    std::lock_guard lock(mutex_);
    auto& pool = pools_[block->stream->device];
    pool.used_bytes -= block->nbytes;
    for (Stream* stream : block->recorded) block->until.push_back(place(stream));
    block->recorded.clear();
    if (!block->until.empty()) {
      pool.waiting.push_back(block);
    } else {
      fill_later(block->stream, block->address, block->nbytes, kReleased);
      keep(pool, block);
    }
  }

  void keep(Pool& pool, Block* block) { pool.cached[block->stream].emplace(block->nbytes, block); }

  void take_in(Pool& pool) {
    for (auto at = pool.waiting.begin(); at != pool.waiting.end();) {
      Block* const block = *at;
      if (!all_passed(block->until)) {
        ++at;
        continue;
      }
      at = pool.waiting.erase(at);
      block->until.clear();
      fill_later(block->stream, block->address, block->nbytes, kReleased);
      keep(pool, block);
    }
  }

  // Give what is cached back to the system; as with CUDA that waits for the device.
  void flush(int device) {
    auto& pool = pools_[device];
    for (Block* block : pool.waiting)
      for (const Mark& mark : block->until) mark.wait();
    take_in(pool);
    for (auto& [stream, cached] : pool.cached) {
      if (!cached.empty()) stream->wait_all();
      for (const auto& [nbytes, block] : cached) {
        arena(device).give_back(block->address, nbytes);
        pool.reserved_bytes -= nbytes;
        delete block;
      }
      cached.clear();
    }
  }

  std::mutex mutex_;
  Pool pools_[kNumDevices];
};

inline DeviceMemory& device_memory() {
  static auto* const made = new DeviceMemory;
  return *made;
}

inline void DeviceMemory::release(void* context) {
  Released released;
  if (!forked) device_memory().put_back(static_cast<Block*>(context));
}

struct Pinned {
  char* address;
  size_t nbytes;
  std::set<Stream*> recorded = {};
  std::vector<Mark> until = {};
  std::map<Stream*, Mark> copies = {};  // of memory that the driver has registered: behind the last one on each stream
};

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    if (!wanted) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    Released released;
    if (!contexts[0] && !contexts[1]) make_context(current_device);
    require_parent();
    if (settings.refuse_pinning) throw std::runtime_error("the simulated device was told to refuse pinning");
    size_t nbytes = 4096;
    while (nbytes < wanted) nbytes *= 2;
    std::lock_guard lock(mutex_);
    take_in();
    Pinned* block = nullptr;
    for (auto at = cached_.begin(); at != cached_.end(); ++at)
      if ((*at)->nbytes == nbytes) {
        block = *at;
        cached_.erase(at);
        break;
      }
    if (!block) {
      void* const address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, address != MAP_FAILED, "no memory to pin: ", nbytes, " bytes");
      block = new Pinned{static_cast<char*>(address), nbytes};
      reserved_bytes += nbytes;
    }
    used_bytes += nbytes;
    blocks_[block->address] = block;
    if (settings.fills) std::memset(block->address, kFresh, block->nbytes);
    return {block->address, block, &PinnedMemory::release, c10::Device(c10::DeviceType::CPU)};
  }

  Pinned* find(const void* address) {
    if (forked) return nullptr;
    std::lock_guard lock(mutex_);
    auto found = blocks_.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
    if (found == blocks_.begin()) return nullptr;
    Pinned* const block = std::prev(found)->second;
    return address < block->address + block->nbytes ? block : nullptr;
  }

  // Memory of a program that the driver pins and releases, as by cuMemHostRegister.
  void add_registered(void* address, size_t nbytes) {
    require_parent();
    std::lock_guard lock(mutex_);
    used_bytes += nbytes;
    reserved_bytes += nbytes;
    blocks_[static_cast<char*>(address)] = new Pinned{static_cast<char*>(address), nbytes};
  }
  void remove_registered(void* address) {
    require_parent();
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<char*>(address));
    if (found == blocks_.end()) throw std::runtime_error("this memory is not registered");
    for (const auto& [stream, copy] : found->second->copies)
      if (!copy.passed()) ++num_unpinned_early;  // throws where a copy has failed: a lost device unpins nothing
    used_bytes -= found->second->nbytes;
    reserved_bytes -= found->second->nbytes;
    delete found->second;
    blocks_.erase(found);
  }
  void note_copy(const void* address, Stream* stream) {
    Pinned* const block = find(address);
    std::lock_guard lock(mutex_);
    if (block) block->copies[stream] = place(stream);
  }

  // As torch's: by the allocation itself, or by its first address; an address inside is not found.
  bool record_event(void* address, void* context, c10::Stream stream) override {
    require_parent();
    std::lock_guard lock(mutex_);
    for (auto& [start, block] : blocks_)
      if (block == context || start == address) {
        block->recorded.insert(stream_number(stream.device_index(), stream.id()));
        return true;
      }
    return false;
  }

  void empty_cache() override {
    std::lock_guard lock(mutex_);
    take_in();
    for (Pinned* block : cached_) {
      munmap(block->address, block->nbytes);
      reserved_bytes -= block->nbytes;
      delete block;
    }
    cached_.clear();
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override { default_copy_data(target, source, nbytes); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  std::atomic<size_t> used_bytes{0}, reserved_bytes{0};
  std::atomic<int64_t> num_unpinned_early{0};

 private:
  static void release(void* context);

  void put_back(Pinned* block) {
    std::lock_guard lock(mutex_);
    used_bytes -= block->nbytes;
    blocks_.erase(block->address);
    for (Stream* stream : block->recorded) block->until.push_back(place(stream));
    block->recorded.clear();
    waiting_.push_back(block);
    try {
      take_in();
    } catch (const std::exception&) {  // a copy failed: the next allocation raises it, a release cannot
    }
  }

  void take_in() {
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      Pinned* const block = *at;
      if (!all_passed(block->until)) {
        ++at;
        continue;
      }
      at = waiting_.erase(at);
      block->until.clear();
      if (settings.fills) std::memset(block->address, kReleased, block->nbytes);
      cached_.push_back(block);
    }
  }

  std::mutex mutex_;
  std::map<char*, Pinned*> blocks_;
  std::list<Pinned*> cached_, waiting_;
};

inline PinnedMemory& pinned_memory() {
  static auto* const made = new PinnedMemory;
  return *made;
}

inline void PinnedMemory::release(void* context) {
  if (!forked) pinned_memory().put_back(static_cast<Pinned*>(context));
}

}  // namespace sim
