// A pool that grows to what is asked for, sleeps between calls, and is never destroyed: threads that wait at the exit of
// the process touch nothing. A forked child has none of its parent's threads, so it starts a pool of its own.
#include "threads.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace polyscale {
namespace {

constexpr int MAX_THREADS = 512;

struct Job {
    void (*task)(void*, int64_t);
    void* context;
    int64_t count;
    std::atomic<int64_t> next;
    int inside;  // threads of the pool that work on it; guarded by Pool::mutex_

    void work() {
        for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(context, i);
    }
};

class Pool {
public:
    explicit Pool(pid_t owner) : owner_(owner) {}

    pid_t owner() const { return owner_; }

    bool run(int64_t count, int threads, void (*task)(void*, int64_t), void* context) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return false;
        const int helpers = grow(int(std::min<int64_t>(std::min(threads, MAX_THREADS), count)) - 1);
        Job job{task, context, count, {0}, 0};
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            wanted_ = helpers;
        }
        for (int i = 0; i < helpers; ++i) ready_.notify_one();
        job.work();
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr;  // a thread that wakes now finds nothing to do
        wanted_ = 0;
        done_.wait(lock, [&] { return job.inside == 0; });
        return true;
    }

private:
    // Only called by the owner of turn_. Returns how many threads there are, at most `wanted`.
    int grow(int wanted) {
        while (size_ < wanted) {
            try {
                std::thread([this] { serve(); }).detach();
            } catch (const std::system_error&) {
                break;  // the system gives no more: fewer do the work
            }
            ++size_;
        }
        return std::min(size_, wanted);
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            ready_.wait(lock, [&] { return job_ != nullptr && wanted_ > 0; });
            Job* job = job_;
            --wanted_;
            ++job->inside;
            lock.unlock();
            job->work();
            lock.lock();
            if (--job->inside == 0) done_.notify_one();
        }
    }

    const pid_t owner_;
    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable ready_, done_;
    Job* job_ = nullptr;
    int wanted_ = 0;
    int size_ = 0;
};

std::atomic<Pool*> current{nullptr};

Pool& pool() {
    const pid_t process = getpid();
    Pool* found = current.load();
    while (found == nullptr || found->owner() != process) {
        Pool* fresh = new Pool(process);
        if (current.compare_exchange_strong(found, fresh)) return *fresh;
        delete fresh;  // another thread was quicker; this one has started nothing
    }
    return *found;
}

}  // namespace

void run_tasks(int64_t count, int threads, void (*task)(void*, int64_t), void* context) {
    if (threads > 1 && count > 1 && pool().run(count, threads, task, context)) return;
    for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace polyscale
