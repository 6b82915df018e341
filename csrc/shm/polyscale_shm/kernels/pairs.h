// Messages between two ranks of a group: sends and receives in flight, in any number and direction.
#pragma once

#include <condition_variable>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group.h"

namespace polyscale {

struct Message {
    bool sends = false;
    int32_t peer = 0;  // -1: any, of a receive; then where it came from
    int32_t tag = 0;
    uint32_t dtype = 0;
    char* at = nullptr;
    uint64_t bytes = 0;
    double timeout = 0.0;
    // The rest is the transport's, under its lock.
    bool done = false;
    std::exception_ptr error;
    double deadline = 0.0;
    bool begun = false;    // sends: it has its number; receives: it has found its message
    uint64_t order = 0;    // among the messages from one rank to another
    uint64_t moved = 0;    // bytes
    Slot* slot = nullptr;  // sends: where it waits for the receiver
    char* block = nullptr; // sends: a copy that the receiver can map
    bool refused = false;  // sends: no memory for a copy
};

class Pairs {
   public:
    explicit Pairs(std::shared_ptr<Group> group);
    ~Pairs() { close(); }

    void submit(const std::shared_ptr<Message>& message);
    // Throws its error; or, with `seconds` >= 0, that it is late.
    void wait(Message& message, double seconds);
    bool is_done(Message& message);
    size_t left();
    void close();

   private:
    typedef std::list<std::shared_ptr<Message>> Messages;

    bool advance();
    bool step(Message& message);
    bool try_step(Message& message);
    bool send_step(Message& message);
    bool post(Message& message);
    bool receive_step(Message& message);
    bool accept(Message& message, uint32_t from, Slot* slot);
    Slot* matching(const Message& message, uint32_t* from);
    void take(Message& message, uint32_t from, Slot* slot);
    void look_around();
    bool left_by(uint32_t rank) const;
    void withdraw(Message& message);
    void fail(Message& message, const std::string& why);
    void drive(std::unique_lock<std::mutex>& hold, const Message* until, double limit);
    void serve();
    std::string name(const Message& message) const;

    std::shared_ptr<Group> group_;
    std::mutex lock_;
    std::condition_variable changed_;
    Messages messages_;
    std::vector<uint64_t> next_;      // per receiver: the number of the next message
    std::vector<bool> blocked_;       // per receiver: an earlier message has no slot yet
    bool driving_ = false, closing_ = false;
    double looked_ = 0.0;
    Patience patience_;
    std::thread thread_;
};

}  // namespace polyscale
