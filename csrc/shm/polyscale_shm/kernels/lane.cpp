#include "lane.h"

#include <stdio.h>

#include <algorithm>
#include <chrono>

namespace polyscale {
namespace {

constexpr std::chrono::milliseconds SLICE(200);

}  // namespace

void Lane::run(Call& call) {
    group_->require_usable();
    std::unique_lock<std::mutex> hold(lock_);
    call.number = ++number_;
    if (busy_ || !jobs_.empty()) {
        const std::shared_ptr<Job> job = std::make_shared<Job>();
        job->call = call;
        jobs_.push_back(job);
        hold.unlock();
        try {
            wait(*job, -1.0);
        } catch (...) {
            withdraw(job);
            call = job->call;
            throw;
        }
        call = job->call;
        return;
    }
    busy_ = true;
    hold.unlock();
    std::exception_ptr error;
    try {
        group_->run(call);
    } catch (const Interrupted& interrupted) {
        error = interrupted.by;
    } catch (...) {
        error = std::current_exception();
    }
    hold.lock();
    busy_ = false;
    if (!jobs_.empty()) changed_.notify_all();
    hold.unlock();
    if (error) std::rethrow_exception(error);
}

// Who waited has given up, and frees the memory that the call names: nobody may carry it out later.
void Lane::withdraw(const std::shared_ptr<Job>& job) {
    std::unique_lock<std::mutex> hold(lock_);
    if (job->done) return;
    group_->break_off("ProcessGroupShm: " + numbered(*job) + " was interrupted");
    const auto found = std::find(jobs_.begin(), jobs_.end(), job);
    if (found != jobs_.end()) {
        jobs_.erase(found);
        changed_.notify_all();
        return;
    }
    while (!job->done) changed_.wait_for(hold, SLICE);  // soon: the group is broken
}

// A group that is of no more use says so to who waits.
void Lane::submit(const std::shared_ptr<Job>& job) {
    if (group_->forked()) group_->require_usable();
    std::lock_guard<std::mutex> hold(lock_);
    job->call.number = ++number_;
    if (closing_) {
        job->error = std::make_exception_ptr(Lost("ProcessGroupShm: the group was destroyed"));
        job->done = true;
        return;
    }
    jobs_.push_back(job);
    if (!thread_.joinable()) thread_ = std::thread(&Lane::serve, this);
    changed_.notify_all();
}

// The first job, with the lock released meanwhile; returns what interrupted this thread.
std::exception_ptr Lane::carry_out(std::unique_lock<std::mutex>& hold) {
    busy_ = true;
    const std::shared_ptr<Job> job = jobs_.front();
    jobs_.pop_front();
    hold.unlock();
    std::exception_ptr error, interrupt;
    try {
        group_->run(job->call);
    } catch (const Interrupted& interrupted) {
        interrupt = interrupted.by;
        error = std::make_exception_ptr(Lost("ProcessGroupShm: " + numbered(*job) + " was interrupted"));
    } catch (...) {
        error = std::current_exception();
    }
    hold.lock();
    job->error = error;
    job->done = true;
    busy_ = false;
    changed_.notify_all();
    return interrupt;
}

void Lane::wait(Job& job, double seconds) {
    if (group_->forked()) group_->require_usable();
    std::unique_lock<std::mutex> hold(lock_);
    const double until = now() + seconds;
    while (!job.done) {
        if (seconds < 0 && !busy_ && !jobs_.empty()) {
            if (const std::exception_ptr interrupt = carry_out(hold)) std::rethrow_exception(interrupt);
            continue;
        }
        if (seconds >= 0 && now() >= until) throw Lost(late(job, seconds));
        auto slice = SLICE;
        if (seconds >= 0) slice = std::min(slice, std::chrono::milliseconds(int64_t((until - now()) * 1000) + 1));
        changed_.wait_for(hold, slice);
        if (job.done || !group_->while_waiting) continue;
        hold.unlock();
        group_->while_waiting();
        hold.lock();
    }
    if (job.error) std::rethrow_exception(job.error);
}

std::string Lane::late(const Job& job, double seconds) const {
    char text[32];
    snprintf(text, sizeof text, "%g", seconds);
    return "ProcessGroupShm: waiting for " + describe(job.call.signature) + ", number " +
           std::to_string(job.call.number) + " of the group, timed out after " + text + " s: " + group_->waiting_for();
}

std::string Lane::numbered(const Job& job) {
    return std::string(kind_name(job.call.signature.kind)) + " number " + std::to_string(job.call.number);
}

bool Lane::is_done(Job& job) {
    std::lock_guard<std::mutex> hold(lock_);
    return job.done;
}

size_t Lane::left() {
    std::lock_guard<std::mutex> hold(lock_);
    return jobs_.size() + (busy_ ? 1 : 0);
}

void Lane::serve() {
    std::unique_lock<std::mutex> hold(lock_);
    while (!closing_ || !jobs_.empty()) {
        if (!busy_ && !jobs_.empty())
            carry_out(hold);
        else
            changed_.wait(hold);
    }
}

// What waits is refused by the group, which closes first, and ends so.
void Lane::close() {
    if (group_->forked()) {
        if (thread_.joinable()) thread_.detach();  // of the parent
        return;
    }
    group_->close();
    {
        std::unique_lock<std::mutex> hold(lock_);
        closing_ = true;
        changed_.notify_all();
        while (busy_ || !jobs_.empty()) {
            if (!busy_ && !jobs_.empty())
                carry_out(hold);
            else
                changed_.wait_for(hold, SLICE);
        }
    }
    if (thread_.joinable()) thread_.join();
}

}  // namespace polyscale
