// What Python sees: addresses, sizes and numbers. The checks of tensors are in polyscale_communication.
#include <pybind11/pybind11.h>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lane.h"
#include "pairs.h"

namespace py = pybind11;
using namespace polyscale;

namespace {

// From a list of (address, bytes).
std::vector<Piece> pieces_of(const py::list& given) {
    std::vector<Piece> pieces;
    pieces.reserve(given.size());
    for (const py::handle each : given) {
        const py::tuple pair = py::reinterpret_borrow<py::tuple>(each);
        pieces.push_back({reinterpret_cast<char*>(pair[0].cast<uintptr_t>()), pair[1].cast<uint64_t>()});
    }
    return pieces;
}

// Signals of Python are handled on the main thread only.
void check_signals() {
    if (syscall(SYS_gettid) != getpid()) return;
    py::gil_scoped_acquire hold;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A block of the heap, or a mapping, as a buffer; given back with the last tensor that has it.
struct Memory {
    char* at = nullptr;
    uint64_t bytes = 0;
    bool block = false;
    char* mapped = nullptr;
    std::unique_ptr<Segment> segment;
    int owner = getpid();

    Memory() = default;
    Memory(const Memory&) = delete;
    ~Memory() {
        if (owner != getpid()) {
            (void)segment.release();
            return;
        }
        if (block) heap().free(at);
        if (mapped != nullptr) munmap(mapped, bytes);
    }
};

std::unique_ptr<Memory> allocate(uint64_t bytes) {
    std::unique_ptr<Memory> memory(new Memory);
    memory->at = heap().allocate(bytes);
    memory->bytes = bytes;
    memory->block = true;
    return memory;
}

// The parts of one process group. Closed explicitly, or with its last reference.
struct Transport {
    std::shared_ptr<Group> group;
    std::unique_ptr<Lane> lane;
    std::unique_ptr<Pairs> pairs;
    std::mutex closing;
    bool closed = false;

    Transport(uint32_t rank, uint32_t world, uint64_t nonce) : group(std::make_shared<Group>(rank, world, nonce)) {}
    ~Transport() {
        if (!group->forked()) {
            close();
            return;
        }
        (void)lane.release();  // their threads are the parent's
        (void)pairs.release();
        new std::shared_ptr<Group>(group);
    }

    void start(uint64_t staging, double spin_s, bool read_memory) {
        Settings settings;
        settings.staging = staging;
        settings.spin_s = spin_s;
        settings.read_memory = read_memory;
        group->start(settings);
        group->while_waiting = check_signals;
        lane.reset(new Lane(group));
        pairs.reset(new Pairs(group));
    }
    void close() {
        py::gil_scoped_release release;
        group->close();
        if (pairs) pairs->close();
        if (lane) lane->close();
        std::lock_guard<std::mutex> hold(closing);
        if (!closed && !group->forked()) group->release();
        closed = true;
    }
};

Call make_call(uint32_t kind, uint32_t dtype, uint32_t operation, int root, uint64_t count, double factor,
               double timeout) {
    Call call;
    call.signature = {kind, dtype, operation, root, count, 0};
    call.factor = factor;
    call.timeout = timeout;
    return call;
}

// Tensors of one piece, or of `world` equal ones that follow one another; an address of 0: there is none.
Call simple_call(const Transport& self, uint32_t kind, uint32_t dtype, uint32_t operation, int root, uint64_t count,
                 uintptr_t in, uintptr_t out, double factor, double timeout) {
    Call call = make_call(kind, dtype, operation, root, count, factor, timeout);
    const uint64_t bytes = count * size_of(dtype);
    const uint32_t world = self.group->world;
    const auto fill = [&](std::vector<Piece>& pieces, uintptr_t at, uint32_t n) {
        if (at == 0) return;
        pieces.reserve(n);
        for (uint32_t i = 0; i < n; ++i) pieces.push_back({reinterpret_cast<char*>(at) + i * bytes, bytes});
    };
    fill(call.ins, in, kind == REDUCE_SCATTER || kind == SCATTER ? world : 1);
    fill(call.outs, out, kind == ALL_GATHER || kind == GATHER ? world : 1);
    return call;
}

Call listed_call(uint32_t kind, uint32_t dtype, uint32_t operation, int root, uint64_t count, const py::list& ins,
                 const py::list& outs, bool uneven, double factor, double timeout) {
    Call call = make_call(kind, dtype, operation, root, count, factor, timeout);
    call.signature.uneven = uneven ? 1 : 0;
    call.ins = pieces_of(ins);
    call.outs = pieces_of(outs);
    return call;
}

std::shared_ptr<Job> submitted(Transport& self, Call&& call) {
    const std::shared_ptr<Job> job = std::make_shared<Job>();
    job->call = std::move(call);
    py::gil_scoped_release release;
    self.lane->submit(job);
    return job;
}

void carried_out(Transport& self, Call& call) {
    py::gil_scoped_release release;
    self.lane->run(call);
}

std::shared_ptr<Message> message_of(Transport& self, bool sends, int peer, int tag, uint32_t dtype, uintptr_t at,
                                    uint64_t bytes, double timeout) {
    const std::shared_ptr<Message> message = std::make_shared<Message>();
    message->sends = sends;
    message->peer = peer;
    message->tag = tag;
    message->dtype = dtype;
    message->at = reinterpret_cast<char*>(at);
    message->bytes = bytes;
    message->timeout = timeout;
    py::gil_scoped_release release;
    self.pairs->submit(message);
    return message;
}

std::unique_ptr<Memory> shared(Transport& self, uint64_t bytes, double timeout) {
    std::unique_ptr<Memory> memory(new Memory);
    Call call = make_call(SHARE, 0, NO_OPERATION, -1, bytes, 1.0, timeout);
    if (self.group->rank == 0) try {
            memory->segment = make_segment(bytes);
            const Segment& segment = *memory->segment;
            call.shared = {PLACE_SEGMENT, segment.number, segment.fd, 0, segment.size, 0};
            memory->at = segment.base;
        } catch (const SystemFailure& failure) {
            call.shared = {PLACE_NONE, 0, -1, 0, 0, uint64_t(failure.code)};
        }
    try {
        carried_out(self, call);
    } catch (...) {
        if (call.mapped != nullptr) munmap(call.mapped, call.shared.size);
        throw;
    }
    if (memory->segment != nullptr) {
        memory->bytes = memory->segment->size;
    } else {
        memory->at = memory->mapped = call.mapped;
        memory->bytes = call.shared.size;
    }
    return memory;
}

std::string error_text(const std::exception_ptr& error) {
    if (!error) return "";
    try {
        std::rethrow_exception(error);
    } catch (const std::exception& found) {
        return found.what();
    } catch (...) {
        return "an unknown error";
    }
}

}  // namespace

PYBIND11_MODULE(polyscale_shm_native, module) {
    py::register_exception<SystemFailure>(module, "SystemFailure", PyExc_OSError);
    py::register_exception<Mismatch>(module, "Mismatch", PyExc_RuntimeError);
    py::register_exception<NotShared>(module, "NotShared", PyExc_RuntimeError);
    py::register_exception<Lost>(module, "Lost", PyExc_RuntimeError);

    py::class_<Memory>(module, "Memory", py::buffer_protocol())
        .def_buffer([](Memory& self) {
            return py::buffer_info(self.at, 1, py::format_descriptor<uint8_t>::format(), py::ssize_t(self.bytes));
        })
        .def_property_readonly("address", [](const Memory& self) { return reinterpret_cast<uintptr_t>(self.at); });
    py::class_<Job, std::shared_ptr<Job>>(module, "Job");
    py::class_<Message, std::shared_ptr<Message>>(module, "Message").def_readonly("peer", &Message::peer);

    py::class_<Transport, std::shared_ptr<Transport>>(module, "Transport")
        .def(py::init<uint32_t, uint32_t, uint64_t>())
        .def_property_readonly("fd", [](const Transport& self) { return self.group->fd(); })
        .def_property_readonly("address", [](const Transport& self) { return self.group->address(); })
        .def("connect",
             [](Transport& self, uint32_t rank, int pid, uint64_t started, int fd, uint64_t nonce,
                const std::string& socket) {
                 self.group->connect(rank, pid, started, fd, nonce, socket);
             })
        .def("can_read", [](Transport& self, uint32_t rank, uint64_t address,
                            uint64_t nonce) { return self.group->can_read(rank, address, nonce); })
        .def("start", &Transport::start)
        .def("close", &Transport::close)
        .def("run",
             [](Transport& self, uint32_t kind, uint32_t dtype, uint32_t operation, int root, uint64_t count,
                uintptr_t in, uintptr_t out, double factor, double timeout) {
                 Call call = simple_call(self, kind, dtype, operation, root, count, in, out, factor, timeout);
                 carried_out(self, call);
             })
        .def("submit",
             [](Transport& self, uint32_t kind, uint32_t dtype, uint32_t operation, int root, uint64_t count,
                uintptr_t in, uintptr_t out, double factor, double timeout) {
                 Call call = simple_call(self, kind, dtype, operation, root, count, in, out, factor, timeout);
                 return submitted(self, std::move(call));
             })
        .def("run_listed",
             [](Transport& self, uint32_t kind, uint32_t dtype, uint32_t operation, int root, uint64_t count,
                const py::list& ins, const py::list& outs, bool uneven, double factor, double timeout) {
                 Call call = listed_call(kind, dtype, operation, root, count, ins, outs, uneven, factor, timeout);
                 carried_out(self, call);
             })
        .def("submit_listed",
             [](Transport& self, uint32_t kind, uint32_t dtype, uint32_t operation, int root, uint64_t count,
                const py::list& ins, const py::list& outs, bool uneven, double factor, double timeout) {
                 Call call = listed_call(kind, dtype, operation, root, count, ins, outs, uneven, factor, timeout);
                 return submitted(self, std::move(call));
             })
        .def("wait",
             [](Transport& self, const std::shared_ptr<Job>& job, double seconds) {
                 py::gil_scoped_release release;
                 self.lane->wait(*job, seconds);
             })
        .def("is_done", [](Transport& self, const std::shared_ptr<Job>& job) { return self.lane->is_done(*job); })
        .def("error_of", [](Transport& self, const std::shared_ptr<Job>& job) {
            return self.lane->is_done(*job) ? error_text(job->error) : "";
        })
        .def("message", &message_of)
        .def("wait_message",
             [](Transport& self, const std::shared_ptr<Message>& message, double seconds) {
                 py::gil_scoped_release release;
                 self.pairs->wait(*message, seconds);
             })
        .def("is_message_done",
             [](Transport& self, const std::shared_ptr<Message>& message) {
                 py::gil_scoped_release release;
                 return self.pairs->is_done(*message);
             })
        .def("error_of_message", [](Transport& self, const std::shared_ptr<Message>& message) {
            return self.pairs->is_done(*message) ? error_text(message->error) : "";
        })
        .def("left", [](Transport& self) { return self.lane->left() + self.pairs->left(); })
        .def("shared", &shared);

    module.def("allocate", &allocate);
    module.def("is_ours", [](uintptr_t at, uint64_t bytes) {
        Place place;
        return heap().find(reinterpret_cast<char*>(at), bytes, &place);
    });
    module.def("usage", [] {
        const std::vector<uint64_t> usage = heap().usage();
        return py::make_tuple(usage[0], usage[1], usage[2], usage[3]);
    });
    module.def("keep", [](uint64_t bytes) { heap().keep(bytes); });
    module.def("serve", &serve_descriptors);
    module.def("reducible", [](uint32_t dtype, uint32_t operation) { return reduction(dtype, operation) != nullptr; });
    module.def("instruction_set", &instruction_set);
    module.def("set_instruction_set", &set_instruction_set);
}
