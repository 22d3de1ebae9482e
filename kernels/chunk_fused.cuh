// What both roles of the fused forward share (chunk_fused_hopper.cu): its parameters, shared memory, and a block's work.
//
// CONSUMERS, compiled in: warpgroups that take 64 columns of V each, 1 or 2.
#pragma once
#define SPLIT 1
#define GROUPS (4 * CONSUMERS)
#define STAGES 1
#include "chunk_hopper.cuh"

#include "chunk_decay.cuh"
#include "chunk_inverse.cuh"

struct ChunkFusedParams {
    // (64, HK, T, K / 64) in copies of all columns of 64 tokens, (64, HV, T, V / 64) in copies of a block's columns
    TensorMap q, k, v;
    ChunkParams chunk;
};

#if HOPPER
constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int TURNS = 3; // chunks whose q, k and v are in shared memory at once
constexpr int READY = 3; // chunks that are prepared at once

// Tiles of one chunk, filled by the copy engine: first of the keys, then of the queries, then of the values.
constexpr u32 QUERIES_AT = SPANS * TILE_BYTES, VALUES_AT = 2 * SPANS * TILE_BYTES, TURN_TILES = 2 * SPANS + CONSUMERS;

struct Shared {
    Tile turns[TURNS][TURN_TILES];
    Tile inverse[READY], scores[READY]; // element (i, j) at place_in_tile(i, j)
    operand lower[SQUARE_TILE];
    float coefficients[READY][MOST * CHUNK];
    float diagonal[TILES][16][16];           // L_ij of a block at [j][i]: columns are read
    float column_decay[TILES][CHUNK];        // e^{G_m - G_j}, m the first token of the block; 0 from m on
    float key[2][CHUNK], query[2][CHUNK];    // rk, rq / s; a warp may begin with a chunk before all have left the one before
    Gates gates[2];
    Barrier filled[TURNS]; // by the copy engine
    Barrier ready[READY];  // by the preparer
    Barrier used[READY];   // by the consumers
};
static_assert(sizeof(Shared) <= (TURNS * TURN_TILES + 2 * READY) * TILE_BYTES + (24 << 10), "the launch has as much");
constexpr int PREPARED_BARRIER = 1; // named barrier of the preparer

// The largest magnitude of each half of two words of 16-bit floating-point numbers, which are ordered like integers.
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    u32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b & 0x7fff7fffu));
    return y;
}

// What both roles know of a block.
struct Block {
    const ChunkFusedParams& params;
    Shared& s;
    Segment segment;
    int head, qk_head, first_column;
    bool identity; // columns of the identity and v = 0
    bool queries;  // whether there is an output

    __device__ __forceinline__ int turns() const { return segment.end - segment.begin; }
    __device__ __forceinline__ int token_of(int turn) const { return segment.token + turn * CHUNK; }
    __device__ __forceinline__ int length_of(int turn) const { return min(CHUNK, segment.tokens - turn * CHUNK); }

    // By one thread: starts the copies of a chunk, if there is one.
    __device__ __forceinline__ void fill(int turn) const {
        if (turn >= turns()) return;
        const u32 to = shared_address(s.turns[turn % TURNS]);
        Barrier* barrier = s.filled + turn % TURNS;
        const int kinds = queries ? 2 : 1;
        barrier_expect(barrier, (kinds * SPANS + (identity ? 0 : CONSUMERS)) * TILE_BYTES);
        copy_tile(to, params.k, {0, qk_head, token_of(turn), 0}, barrier);
        if (queries) copy_tile(to + QUERIES_AT, params.q, {0, qk_head, token_of(turn), 0}, barrier);
        if (!identity) copy_tile(to + VALUES_AT, params.v, {0, head, token_of(turn), first_column / SPAN}, barrier);
    }
};
#endif
