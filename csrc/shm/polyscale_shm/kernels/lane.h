// Collectives of one group in the order of their calls: on the thread that waits for one, or on one of the lane's own.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "group.h"

namespace polyscale {

struct Job {
    Call call;
    bool done = false;  // under the lane's lock
    std::exception_ptr error;
};

class Lane {
   public:
    explicit Lane(std::shared_ptr<Group> group) : group_(std::move(group)) {}
    ~Lane() { close(); }

    // On this thread where nothing is before it.
    void run(Call& call);
    // Carried out later by whoever comes first: a waiter, or the lane's thread.
    void submit(const std::shared_ptr<Job>& job);
    // Waits, and carries out what is before it; with `seconds` >= 0 it only waits. Throws its error, or Lost.
    void wait(Job& job, double seconds);
    bool is_done(Job& job);
    // Collectives that were begun or are waiting.
    size_t left();
    void close();

   private:
    std::exception_ptr carry_out(std::unique_lock<std::mutex>& hold);
    void withdraw(const std::shared_ptr<Job>& job);
    void serve();
    std::string late(const Job& job, double seconds) const;
    static std::string numbered(const Job& job);

    std::shared_ptr<Group> group_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Job>> jobs_;
    bool busy_ = false, closing_ = false;
    uint64_t number_ = 0;
    std::thread thread_;
};

}  // namespace polyscale
