// How the bytes of a collective move, in rounds.
//
// In the first round every rank posts a record: what it calls, and where its data lie. Small data are within the record
// (one round, and nobody waits for a reader); data in a segment, or that peers may read in ordinary memory, are read in
// place. What is left goes through a staging block in chunks, one round each, in two halves: while a rank fills one,
// the others read the other. A rank whose memory is read in place ends its collective when all readers have done so.
#include <errno.h>
#include <string.h>

#include <algorithm>

#include "group.h"

namespace polyscale {
namespace {

constexpr uint64_t BOUNCE_BYTES = 131072;  // of each rank's ordinary memory at a time, on its way into a sum

uint64_t chunks_of(uint64_t bytes, uint64_t chunk) { return (bytes + chunk - 1) / chunk; }

bool follow_one_another(const std::vector<Piece>& pieces) {
    for (size_t i = 1; i < pieces.size(); ++i)
        if (pieces[i].at != pieces[i - 1].at + pieces[i - 1].bytes) return false;
    return true;
}

uint64_t total_of(const std::vector<Piece>& pieces) {
    uint64_t total = 0;
    for (const Piece& piece : pieces) total += piece.bytes;
    return total;
}

}  // namespace

class Collective {
   public:
    Collective(Group& group, Call& call)
        : g(group),
          c(call),
          me(group.rank),
          world(group.world),
          element(size_of(call.signature.dtype)),
          deadline(now() + call.timeout) {}

    void run();

   private:
    // Where the piece for this rank lies on another one, and how it is read.
    struct View {
        PlaceKind kind = PLACE_NONE;
        const char* at = nullptr;  // mapped here
        uint64_t remote = 0;       // PLACE_ADDRESS
        uint64_t bytes = 0;
        uint64_t largest = 0;  // of its pieces, where staged
    };

    void post_record(uint32_t round);
    void place_data(Record* record, char* data);
    void compare() const;
    void compare_pieces() const;
    void look();
    View view_of(uint32_t rank);
    void move_all();
    void move_in_chunks(uint64_t chunks);
    void stage(uint64_t from, uint32_t half);
    void read(uint64_t from, uint64_t bytes, uint32_t half);
    const char* source(uint32_t rank, uint64_t from, uint64_t skip, uint32_t half) const;
    void copy(uint32_t rank, uint64_t from, uint64_t skip, uint64_t bytes, char* to, uint32_t half);
    void sum(uint64_t from, uint64_t skip, uint64_t bytes, char* to, uint32_t half);
    void fetch(uint32_t rank, uint64_t address, void* to, uint64_t bytes);
    void all_reduce();
    void reduce_then_gather(uint64_t from, uint64_t bytes, uint32_t half, char* own);
    void share();

    uint32_t next() { return ++g.round_; }
    void post(uint32_t round) { raise_to(g.header(me).posted, round); }
    void done(uint32_t round) { raise_to(g.header(me).done, round); }
    void wait_posted(uint32_t rank, uint32_t round) {
        if (rank != me) g.wait(rank, Group::POSTED_WORD, round, c, deadline);
    }
    void wait_all_posted(uint32_t round) {
        for (uint32_t rank = 0; rank < world; ++rank) wait_posted(rank, round);
    }
    void wait_all_done(uint32_t round) {
        for (uint32_t rank = 0; rank < world; ++rank)
            if (rank != me) g.wait(rank, Group::DONE_WORD, round, c, deadline);
    }
    Record* record(uint32_t rank) const { return g.layout.record(g.base(rank), first_); }

    uint32_t kind() const { return c.signature.kind; }
    // Pieces differ by the rank that they are for.
    bool per_rank() const { return kind() == ALL_TO_ALL || kind() == SCATTER || kind() == REDUCE_SCATTER; }
    bool sums() const { return kind() == REDUCE_SCATTER || kind() == ALL_REDUCE || kind() == REDUCE; }
    // Whether `reader` reads from `from`.
    bool reads(uint32_t reader, uint32_t from) const {
        const uint32_t root = uint32_t(c.signature.root);
        if (kind() == GATHER || kind() == REDUCE) return reader == root;
        if (kind() == SCATTER || kind() == BROADCAST) return from == root;
        return kind() != BARRIER && kind() != SHARE;
    }
    bool sends() const { return !c.ins.empty(); }

    // Bytes of a chunk: staging has a part for each rank where pieces differ.
    uint64_t chunk() const { return per_rank() ? g.half() / world / 64 * 64 : g.half(); }

    Group& g;
    Call& c;
    const uint32_t me, world;
    const uint64_t element;
    const double deadline;
    uint32_t first_ = 0;
    PlaceKind own_ = PLACE_NONE;
    std::vector<View> views_;
    std::vector<double> factors_;
};

void Group::run(Call& call) {
    require_usable();
    try {
        Collective(*this, call).run();
    } catch (const SystemFailure& failure) {  // the others wait for what this rank cannot do
        lose(std::string("ProcessGroupShm: connection closed by peer: ") + kind_name(call.signature.kind) + " number " +
             std::to_string(call.number) + " on rank " + std::to_string(rank) + ": " + failure.what());
    }
}

void Collective::run() {
    g.require_whole(c);
    first_ = next();
    wait_all_done(first_ - RING);
    post_record(first_);
    wait_all_posted(first_);
    try {
        compare();
    } catch (const Mismatch&) {
        done(first_);
        throw;
    }
    if (kind() == SHARE) return share();
    if (kind() != BARRIER) {
        look();
        if (kind() == ALL_REDUCE) return all_reduce();
        return move_all();
    }
    done(first_);
}

// The record of this rank, with its data where they are few.
void Collective::post_record(uint32_t round) {
    Record* mine = g.layout.record(g.base(me), round);
    mine->signature = c.signature;
    mine->factor = c.factor;
    mine->largest = 0;
    mine->places = 0;
    if (c.signature.uneven != 0) {
        uint64_t* to = g.layout.to_each(mine);
        uint64_t* from = g.layout.from_each(mine);
        for (uint32_t rank = 0; rank < world; ++rank) {
            to[rank] = c.ins[per_rank() ? rank : 0].bytes;
            from[rank] = c.outs[c.outs.size() == 1 ? 0 : rank].bytes;
        }
    }
    if (kind() == SHARE) {
        mine->places = 1;
        g.layout.places(mine)[0] = c.shared;
    }
    if (sends()) place_data(mine, g.layout.inline_data(mine));
    post(round);
}

void Collective::place_data(Record* mine, char* data) {
    Place* places = g.layout.places(mine);
    const uint64_t total = total_of(c.ins);
    for (const Piece& piece : c.ins) mine->largest = std::max(mine->largest, piece.bytes);
    if (total <= INLINE_BYTES) {
        own_ = PLACE_INLINE;
        mine->places = 1;
        places[0] = {PLACE_INLINE, 0, -1, 0, 0, 0};
        if (world == 1) return;
        for (const Piece& piece : c.ins) {
            if (piece.bytes > 0) memcpy(data, piece.at, piece.bytes);
            data += piece.bytes;
        }
        return;
    }
    const bool one = follow_one_another(c.ins);
    mine->places = one ? 1 : uint32_t(c.ins.size());
    own_ = PLACE_SEGMENT;
    for (uint32_t i = 0; i < mine->places; ++i) {
        const uint64_t bytes = one ? total : c.ins[i].bytes;
        places[i].kind = PLACE_SEGMENT;
        if (bytes > 0 && !heap().find(c.ins[i].at, bytes, &places[i])) own_ = PLACE_ADDRESS;
    }
    if (own_ == PLACE_SEGMENT) return;
    if (world > 1 && !g.settings().read_memory) own_ = PLACE_STAGED;
    for (uint32_t i = 0; i < mine->places; ++i)
        places[i] = {own_, 0, -1, 0, 0, reinterpret_cast<uint64_t>(c.ins[i].at)};
    if (own_ != PLACE_STAGED) return;
    mine->places = 1;
    heap().find(g.staging_, 2 * g.half(), &places[0]);
    places[0].kind = PLACE_STAGED;
}

// Every rank looks at all records, so that all come to the same verdict.
void Collective::compare() const {
    const Signature& first = record(0)->signature;
    for (uint32_t rank = 1; rank < world; ++rank) {
        const Signature& other = record(rank)->signature;
        if (memcmp(&first, &other, sizeof first) == 0) continue;
        throw Mismatch("ranks of the group call different collectives: rank 0 " + describe(first) + ", rank " +
                       std::to_string(rank) + " " + describe(other));
    }
    if (c.signature.uneven != 0) compare_pieces();
}

void Collective::compare_pieces() const {
    for (uint32_t from = 0; from < world; ++from)
        for (uint32_t to = 0; to < world; ++to) {
            const uint64_t sent = g.layout.to_each(record(from))[to], wanted = g.layout.from_each(record(to))[from];
            if (sent == wanted) continue;
            throw Mismatch(std::string(kind_name(kind())) + ": rank " + std::to_string(from) + " sends " +
                           std::to_string(sent / element) + " elements to rank " + std::to_string(to) +
                           ", which expects " + std::to_string(wanted / element));
        }
}

// Take from the records what is needed later: they may be overwritten once this rank has ended its first round.
void Collective::look() {
    views_.resize(world);
    for (uint32_t rank = 0; rank < world; ++rank) views_[rank] = view_of(rank);
    factors_.resize(world);
    for (uint32_t rank = 0; rank < world; ++rank) factors_[rank] = record(rank)->factor;
}

Collective::View Collective::view_of(uint32_t rank) {
    View view;
    Record* theirs = record(rank);
    if (theirs->places == 0) return view;
    const Place* places = g.layout.places(theirs);
    const uint32_t index = per_rank() ? me : 0;
    const bool one = theirs->places == 1;
    uint64_t skip = 0;
    if (c.signature.uneven != 0) {
        const uint64_t* to = g.layout.to_each(theirs);
        view.bytes = to[me];
        if (per_rank() && one)
            for (uint32_t i = 0; i < me; ++i) skip += to[i];
    } else {
        view.bytes = c.signature.count * element;
        if (per_rank() && one) skip = me * view.bytes;
    }
    const Place& place = places[one ? 0 : index];
    view.kind = PlaceKind(place.kind);
    view.largest = theirs->largest;
    if (rank == me) {
        view.at = c.ins[per_rank() ? me : 0].at;
    } else if (view.kind == PLACE_INLINE) {
        view.at = g.layout.inline_data(theirs) + skip;
    } else if (view.kind == PLACE_ADDRESS) {
        view.remote = place.at + skip;
    } else if ((view.bytes > 0 || view.kind == PLACE_STAGED) && (reads(me, rank) || kind() == ALL_REDUCE)) {
        view.at = g.peer(rank).at(place) + (view.kind == PLACE_STAGED ? 0 : skip);
    }
    return view;
}

void Collective::move_all() {
    uint64_t chunks = 0;
    for (uint32_t rank = 0; rank < world; ++rank)
        if (views_[rank].kind == PLACE_STAGED) chunks = std::max(chunks, chunks_of(views_[rank].largest, chunk()));
    if (chunks > 0) {
        move_in_chunks(chunks);
    } else {
        read(0, UINT64_MAX, 0);
        done(first_);
    }
    // What is read where it lies, or over several rounds from the record, stays as it is until all have read it.
    if (own_ == PLACE_SEGMENT || own_ == PLACE_ADDRESS || (own_ == PLACE_INLINE && chunks > 0))
        for (uint32_t rank = 0; rank < world; ++rank)
            if (rank != me && reads(rank, me)) g.wait(rank, Group::DONE_WORD, g.round_, c, deadline);
}

void Collective::move_in_chunks(uint64_t chunks) {
    const uint64_t bytes = chunk();
    for (uint64_t k = 0; k < chunks; ++k) {
        const uint32_t round = next(), half = uint32_t(k & 1);
        if (own_ == PLACE_STAGED) {
            wait_all_done(g.staged_[half]);
            stage(k * bytes, half);
            g.staged_[half] = round;
        }
        post(round);
        for (uint32_t rank = 0; rank < world; ++rank)
            if (reads(me, rank) && views_[rank].kind == PLACE_STAGED) wait_posted(rank, round);
        read(k * bytes, bytes, half);
        done(round);
    }
}

void Collective::stage(uint64_t from, uint32_t half) {
    const uint64_t bytes = chunk();
    char* to = g.staging_ + half * g.half();
    for (uint32_t i = 0; i < c.ins.size(); ++i, to += bytes)
        if (c.ins[i].bytes > from && (i != me || !per_rank()))
            memcpy(to, c.ins[i].at + from, std::min(bytes, c.ins[i].bytes - from));
}

// Reads [from, from + bytes) of every piece that is for this rank.
void Collective::read(uint64_t from, uint64_t bytes, uint32_t half) {
    if (c.outs.empty()) return;
    if (sums()) {
        const uint64_t whole = c.outs[0].bytes;
        if (whole > from) sum(from, 0, std::min(bytes, whole - from), c.outs[0].at + from, half);
        return;
    }
    for (uint32_t step = 0; step < world; ++step) {
        const uint32_t rank = (me + step) % world;  // its own first, then each rank another one
        if (!reads(me, rank)) continue;
        const uint64_t whole = views_[rank].bytes;
        char* to = c.outs[c.outs.size() == 1 ? 0 : rank].at;
        if (whole > from) copy(rank, from, 0, std::min(bytes, whole - from), to + from, half);
    }
}

// The bytes from `from` + `skip` of the piece on another rank; `from` is where its chunk begins.
const char* Collective::source(uint32_t rank, uint64_t from, uint64_t skip, uint32_t half) const {
    const View& view = views_[rank];
    if (rank == me || view.kind != PLACE_STAGED) return view.at + from + skip;
    return view.at + half * g.half() + (per_rank() ? me * chunk() : 0) + skip;
}

void Collective::copy(uint32_t rank, uint64_t from, uint64_t skip, uint64_t bytes, char* to, uint32_t half) {
    if (bytes == 0) return;
    if (rank != me && views_[rank].kind == PLACE_ADDRESS)
        return fetch(rank, views_[rank].remote + from + skip, to, bytes);
    const char* there = source(rank, from, skip, half);
    if (to != there) memmove(to, there, bytes);
}

void Collective::fetch(uint32_t rank, uint64_t address, void* to, uint64_t bytes) {
    const int code = g.peer(rank).read(address, to, bytes);
    if (code == 0) return;
    const std::string doing = std::string(kind_name(kind())) + " number " + std::to_string(c.number);
    if (code == ESRCH || g.peer(rank).gone()) g.lose(g.closed_by(rank, doing));
    g.lose("ProcessGroupShm: connection closed by peer: reading the memory of " + g.who(rank) + " during " + doing +
           ": " + strerror(code));
}

// `to` becomes the reduction of `bytes` of every rank's piece, in the order of ranks.
void Collective::sum(uint64_t from, uint64_t skip, uint64_t bytes, char* to, uint32_t half) {
    const Reduce reduce = reduction(c.signature.dtype, c.signature.operation);
    std::vector<const void*> inputs(world);
    bool remote = false;
    for (uint32_t rank = 0; rank < world; ++rank) remote = remote || (rank != me && views_[rank].kind == PLACE_ADDRESS);
    const uint64_t step = remote ? BOUNCE_BYTES : std::max<uint64_t>(bytes, 1);
    if (remote && g.bounce_.size() < world * BOUNCE_BYTES) g.bounce_.resize(world * BOUNCE_BYTES);
    for (uint64_t begin = 0; begin < bytes; begin += step) {
        const uint64_t n = std::min(step, bytes - begin);
        for (uint32_t rank = 0; rank < world; ++rank) {
            const View& view = views_[rank];
            if (rank != me && view.kind == PLACE_ADDRESS) {
                char* bounce = g.bounce_.data() + rank * BOUNCE_BYTES;
                fetch(rank, view.remote + from + skip + begin, bounce, n);
                inputs[rank] = bounce;
            } else {
                inputs[rank] = source(rank, from, skip + begin, half);
            }
        }
        reduce(inputs.data(), factors_.data(), int(world), to + begin, int64_t(n / element));
    }
}

// In place. Few elements: every rank reduces all. Else each reduces a part of its own, and takes the others' from them.
void Collective::all_reduce() {
    const uint64_t bytes = c.ins[0].bytes;
    if (own_ == PLACE_INLINE || world == 1) {
        sum(0, 0, bytes, c.outs[0].at, 0);
        return done(first_);
    }
    bool staged = false;
    for (const View& view : views_) staged = staged || view.kind == PLACE_STAGED;
    if (!staged) {
        reduce_then_gather(0, bytes, 0, c.outs[0].at);
    } else {
        for (uint64_t from = 0; from < bytes; from += g.half()) {
            const uint32_t round = next(), half = uint32_t(from / g.half() & 1);
            const uint64_t n = std::min(g.half(), bytes - from);
            char* own = c.outs[0].at + from;
            if (own_ == PLACE_STAGED) {
                wait_all_done(g.staged_[half]);
                own = g.staging_ + half * g.half();
                memcpy(own, c.ins[0].at + from, n);
            }
            post(round);
            wait_all_posted(round);
            reduce_then_gather(from, n, half, own);
            if (own_ == PLACE_STAGED) g.staged_[half] = g.round_;
        }
    }
    if (own_ != PLACE_STAGED) wait_all_done(g.round_);
}

// Part p of [from, from + bytes) is rank p's to reduce, into `own`: nobody else reads that part there before.
void Collective::reduce_then_gather(uint64_t from, uint64_t bytes, uint32_t half, char* own) {
    const uint64_t part = (bytes / world + 63) / 64 * 64;
    const auto begin = [&](uint32_t rank) { return std::min(bytes, rank * part); };
    const auto end = [&](uint32_t rank) { return rank + 1 == world ? bytes : std::min(bytes, (rank + 1) * part); };
    sum(from, begin(me), end(me) - begin(me), own + begin(me), half);
    const uint32_t round = next();
    post(round);
    wait_all_posted(round);
    char* to = c.outs[0].at + from;
    for (uint32_t step = 0; step < world; ++step) {
        const uint32_t rank = (me + step) % world;
        if (rank != me)
            copy(rank, from, begin(rank), end(rank) - begin(rank), to + begin(rank), half);
        else if (own != to)
            memcpy(to + begin(me), own + begin(me), end(me) - begin(me));
    }
    done(round);
}

// Map the segment of rank 0, and hear whether all others could.
void Collective::share() {
    const Place place = g.layout.places(record(0))[0];
    uint64_t code = place.kind == PLACE_SEGMENT ? 0 : place.at;
    if (code == 0 && me != 0) try {
            c.mapped = g.peer(0).map(place.fd, place.size);
            c.shared = place;
        } catch (const SystemFailure& failure) {
            code = uint64_t(failure.code);
        }
    const uint32_t round = next();
    Record* mine = g.layout.record(g.base(me), round);
    mine->largest = code;
    post(round);
    wait_all_posted(round);
    std::string why;
    for (uint32_t rank = 0; rank < world && why.empty(); ++rank) {
        code = g.layout.record(g.base(rank), round)->largest;
        if (code != 0) why = "rank " + std::to_string(rank) + " cannot have it: " + strerror(int(code));
    }
    done(round);
    if (!why.empty()) throw NotShared("memory that ranks share: " + why);
}

}  // namespace polyscale
