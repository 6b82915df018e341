// A sender puts what it sends into one of the slots for its receiver: small messages whole, for others the place of
// their bytes. The receiver takes the oldest one of the tag, copies the bytes and says so; then the send is complete.
#include "pairs.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>

namespace polyscale {
namespace {

constexpr double SLICE_S = 0.1;

std::string amount(uint64_t bytes, uint32_t dtype) {
    return std::to_string(bytes / size_of(dtype)) + " elements of " + name_of(dtype);
}

std::string difference(uint32_t from, uint32_t to, const std::string& sent, const std::string& wanted) {
    return "send from rank " + std::to_string(from) + " to rank " + std::to_string(to) + ": it sends " + sent +
           ", and the recv expects " + wanted;
}

}  // namespace

Pairs::Pairs(std::shared_ptr<Group> group)
    : group_(std::move(group)), next_(group_->world), blocked_(group_->world), patience_(group_->settings().spin_s) {}

std::string Pairs::name(const Message& message) const {
    std::string text = message.sends ? "send to " : "recv from ";
    text += message.peer < 0 ? "any rank" : group_->who(uint32_t(message.peer));
    return text + " of " + amount(message.bytes, message.dtype) + " with tag " + std::to_string(message.tag);
}

void Pairs::submit(const std::shared_ptr<Message>& message) {
    if (group_->forked()) group_->require_usable();
    std::lock_guard<std::mutex> hold(lock_);
    if (closing_) {
        message->error = std::make_exception_ptr(Lost("ProcessGroupShm: the group was destroyed"));
        message->done = true;
        return;
    }
    message->deadline = now() + message->timeout;
    messages_.push_back(message);
    advance();
    if (message->done) return;
    if (!thread_.joinable()) thread_ = std::thread(&Pairs::serve, this);
    changed_.notify_all();
}

// Moves what can be moved. Whether anything was.
bool Pairs::advance() {
    bool any = false;
    std::fill(blocked_.begin(), blocked_.end(), false);
    for (auto each = messages_.begin(); each != messages_.end();) {
        Message& message = **each;
        if (!message.done) any = try_step(message) || any;
        if (message.done) {
            if (message.block != nullptr) heap().free(message.block);
            message.block = nullptr;
            each = messages_.erase(each);
            any = true;
        } else {
            ++each;
        }
    }
    if (any) changed_.notify_all();
    return any;
}

bool Pairs::step(Message& message) { return message.sends ? send_step(message) : receive_step(message); }

// An error ends the message, not the thread that came by: that one may be driving for others.
bool Pairs::try_step(Message& message) {
    try {
        return step(message);
    } catch (...) {
        message.error = std::current_exception();
        message.done = true;
        return true;
    }
}

bool Pairs::send_step(Message& message) {
    if (message.slot == nullptr) return post(message);
    Slot* slot = message.slot;
    const uint32_t state = slot->state.load(std::memory_order_acquire);
    if (state == REFUSED) {
        const std::string wanted = amount(slot->expected, slot->expected_dtype);
        slot->state.store(FREE, std::memory_order_release);
        throw Mismatch(difference(group_->rank, uint32_t(message.peer), amount(message.bytes, message.dtype), wanted));
    }
    if (state == FAILED) {
        const int code = int(slot->expected);
        slot->state.store(FREE, std::memory_order_release);
        throw Lost("ProcessGroupShm: connection closed by peer: " + name(message) +
                   ": it could not be read there: " + strerror(code));
    }
    if (state != TAKEN) {
        if (message.moved < message.bytes) blocked_[size_t(message.peer)] = true;
        return false;
    }
    slot->state.store(FREE, std::memory_order_release);
    message.slot = nullptr;
    message.done = message.moved == message.bytes;
    if (!message.done) post(message);
    return true;
}

// Put the message, or the next fragment of it, into a free slot.
bool Pairs::post(Message& message) {
    const uint32_t to = uint32_t(message.peer);
    if (blocked_[to]) return false;
    Slot* slot = nullptr;
    for (uint32_t i = 0; i < SLOTS && slot == nullptr; ++i) {
        Slot* each = group_->layout.slot(group_->base(group_->rank), to, i);
        if (each->state.load(std::memory_order_acquire) == FREE) slot = each;
    }
    if (slot == nullptr) {
        blocked_[to] = true;
        return false;
    }
    if (!message.begun) message.order = next_[to]++;
    message.begun = true;
    slot->tag = message.tag;
    slot->dtype = message.dtype;
    slot->order = message.order;
    slot->total = message.bytes;
    slot->offset = message.moved;
    slot->bytes = message.bytes - message.moved;
    slot->place = {PLACE_INLINE, 0, -1, 0, 0, 0};
    if (slot->bytes > SLOT_INLINE && !message.refused && !heap().find(message.at, message.bytes, &slot->place)) {
        if (group_->settings().read_memory) {
            slot->place = {PLACE_ADDRESS, 0, -1, 0, 0, reinterpret_cast<uint64_t>(message.at)};
        } else {
            try {
                message.block = heap().allocate(message.bytes);
                memcpy(message.block, message.at, message.bytes);
                heap().find(message.block, message.bytes, &slot->place);
            } catch (const SystemFailure&) {
                message.refused = true;  // then in fragments
            }
        }
    }
    if (slot->place.kind == PLACE_INLINE) {
        slot->bytes = std::min(slot->bytes, SLOT_INLINE);
        if (slot->bytes > 0) memcpy(Layout::slot_data(slot), message.at + message.moved, slot->bytes);
    }
    message.moved += slot->bytes;
    message.slot = slot;
    if (message.moved < message.bytes) blocked_[to] = true;
    slot->state.store(POSTED, std::memory_order_release);
    ring(group_->header(to).bell);
    return true;
}

// The oldest message for this receive; null: there is none yet.
Slot* Pairs::matching(const Message& message, uint32_t* from) {
    for (uint32_t rank = 0; rank < group_->world; ++rank) {
        if (message.peer >= 0 && rank != uint32_t(message.peer)) continue;
        Slot* best = nullptr;
        for (uint32_t i = 0; i < SLOTS; ++i) {
            Slot* slot = group_->layout.slot(group_->base(rank), group_->rank, i);
            if (slot->state.load(std::memory_order_acquire) != POSTED) continue;
            if (message.begun ? slot->order != message.order : slot->tag != message.tag || slot->offset != 0) continue;
            if (best == nullptr || slot->order < best->order) best = slot;
        }
        *from = rank;
        if (best != nullptr) return best;
    }
    return nullptr;
}

bool Pairs::receive_step(Message& message) {
    uint32_t from = 0;
    bool any = false;
    while (!message.done) {
        Slot* slot = matching(message, &from);
        uint32_t posted = POSTED;
        if (slot == nullptr || !slot->state.compare_exchange_strong(posted, BUSY)) return any;
        if (!message.begun && !accept(message, from, slot)) return true;
        take(message, from, slot);
        any = true;
    }
    return any;
}

// Compare what the two ranks want; a difference is an error on both.
bool Pairs::accept(Message& message, uint32_t from, Slot* slot) {
    if (slot->total == message.bytes && slot->dtype == message.dtype) {
        message.begun = true;
        message.peer = int32_t(from);
        message.order = slot->order;
        return true;
    }
    const std::string sent = amount(slot->total, slot->dtype), wanted = amount(message.bytes, message.dtype);
    slot->expected = message.bytes;
    slot->expected_dtype = message.dtype;
    slot->state.store(REFUSED, std::memory_order_release);
    ring(group_->header(from).bell);
    throw Mismatch(difference(from, group_->rank, sent, wanted));
}

void Pairs::take(Message& message, uint32_t from, Slot* slot) {
    char* to = message.at + slot->offset;
    const uint64_t bytes = slot->bytes;
    int code = 0;
    std::string what;
    if (bytes == 0) {
    } else if (slot->place.kind == PLACE_ADDRESS) {
        code = group_->peer(from).read(slot->place.at + slot->offset, to, bytes);
    } else if (slot->place.kind == PLACE_SEGMENT) {
        try {
            Place& place = slot->place;
            memcpy(to, group_->peer(from).at(place) + slot->offset, bytes);
        } catch (const SystemFailure& failure) {
            code = failure.code;
        }
    } else {
        memcpy(to, Layout::slot_data(slot), bytes);
    }
    if (code != 0) {
        slot->expected = uint64_t(code);  // else the sender would wait until it is late
        slot->state.store(FAILED, std::memory_order_release);
        ring(group_->header(from).bell);
        if (code == ESRCH || group_->peer(from).gone()) throw Lost(group_->closed_by(from, name(message)));
        throw Lost("ProcessGroupShm: connection closed by peer: " + name(message) + ": " + strerror(code));
    }
    message.moved += bytes;
    message.done = message.moved == message.bytes;
    slot->state.store(TAKEN, std::memory_order_release);
    ring(group_->header(from).bell);
}

void Pairs::wait(Message& message, double seconds) {
    if (group_->forked()) group_->require_usable();
    std::unique_lock<std::mutex> hold(lock_);
    const double limit = seconds < 0 ? 0 : now() + seconds;
    while (!message.done) {
        if (limit > 0 && now() >= limit) {
            char text[32];
            snprintf(text, sizeof text, "%g", seconds);
            throw Lost("ProcessGroupShm: waiting for " + name(message) + " timed out after " + text + " s");
        }
        if (!driving_)
            drive(hold, &message, limit);
        else
            changed_.wait_for(hold, std::chrono::milliseconds(50));
        if (message.done || !group_->while_waiting) continue;
        hold.unlock();
        group_->while_waiting();
        hold.lock();
    }
    if (message.error) std::rethrow_exception(message.error);
}

// Until the message is done, or for a slice of time.
void Pairs::drive(std::unique_lock<std::mutex>& hold, const Message* until, double limit) {
    driving_ = true;
    Word& bell = group_->header(group_->rank).bell;
    const double end = now() + SLICE_S;
    while (until != nullptr ? !until->done : !messages_.empty()) {
        const uint32_t seen = bell.value.load(std::memory_order_acquire);
        if (advance()) continue;
        if (now() > looked_ + SLICE_S) {
            looked_ = now();
            look_around();
            continue;
        }
        hold.unlock();
        const bool rung = patience_.spin([&] { return bell.value.load(std::memory_order_acquire) != seen; });
        if (!rung) sleep_on(bell, seen, limit > 0 ? std::min(SLICE_S, std::max(limit - now(), 0.0005)) : SLICE_S);
        hold.lock();
        if (now() > end || closing_) break;
    }
    driving_ = false;
    changed_.notify_all();
}

// Messages with ranks that are gone, or that are late.
void Pairs::look_around() {
    for (auto& each : messages_) {
        Message& message = *each;
        if (message.done) continue;
        if (group_->closing()) {
            fail(message, "ProcessGroupShm: the group was destroyed during " + name(message));
        } else if (message.peer >= 0) {
            const uint32_t peer = uint32_t(message.peer);
            const bool closed = left_by(peer);
            if (group_->peer(peer).gone()) {
                try_step(message);  // what it did before it ended counts
                if (!message.done) fail(message, group_->closed_by(peer, name(message)));
            } else if (closed && !try_step(message)) {
                fail(message, "ProcessGroupShm: connection closed by peer: " + group_->who(peer) +
                                  " has destroyed the group, during " + name(message));
            }
        } else {
            uint32_t away = 0;
            for (uint32_t rank = 0; rank < group_->world; ++rank)
                if (rank != group_->rank && (group_->peer(rank).gone() || left_by(rank))) ++away;
            if (away + 1 == group_->world && !try_step(message))
                fail(message, "ProcessGroupShm: connection closed by peer: all other ranks are gone or have destroyed "
                              "the group, during " + name(message));
        }
        if (!message.done && now() > message.deadline) {
            char seconds[32];
            snprintf(seconds, sizeof seconds, "%g", message.timeout);
            fail(message, "ProcessGroupShm: " + name(message) + " timed out after " + seconds + " s");
        }
    }
    advance();
}

bool Pairs::left_by(uint32_t rank) const {
    return group_->header(rank).state.load(std::memory_order_acquire) == CLOSED;
}

void Pairs::fail(Message& message, const std::string& why) {
    withdraw(message);
    message.error = std::make_exception_ptr(Lost(why));
    message.done = true;
}

// The memory of a send may be gone soon: nobody may read it any more.
void Pairs::withdraw(Message& message) {
    if (!message.sends || message.slot == nullptr) return;
    uint32_t posted = POSTED;
    if (message.slot->state.compare_exchange_strong(posted, FREE)) return;
    const double until = now() + 1.0;
    while (message.slot->state.load(std::memory_order_acquire) == BUSY && now() < until &&
           !group_->peer(uint32_t(message.peer)).gone())
        std::this_thread::yield();
    message.slot->state.store(FREE, std::memory_order_release);
}

bool Pairs::is_done(Message& message) {
    std::lock_guard<std::mutex> hold(lock_);
    if (!message.done && !driving_ && !closing_ && !group_->forked()) advance();
    return message.done;
}

size_t Pairs::left() {
    std::lock_guard<std::mutex> hold(lock_);
    return messages_.size();
}

void Pairs::serve() {
    std::unique_lock<std::mutex> hold(lock_);
    while (!closing_) {
        if (!driving_ && !messages_.empty())
            drive(hold, nullptr, 0);
        else
            changed_.wait(hold);
    }
}

void Pairs::close() {
    if (group_->forked()) {
        if (thread_.joinable()) thread_.detach();  // of the parent
        return;
    }
    group_->close();
    {
        std::unique_lock<std::mutex> hold(lock_);
        if (closing_) return;
        closing_ = true;
        ring(group_->header(group_->rank).bell);
        while (driving_) changed_.wait_for(hold, std::chrono::milliseconds(50));
        look_around();
        changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
}

}  // namespace polyscale
