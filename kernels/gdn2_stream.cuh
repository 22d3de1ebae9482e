// The stream of blocks of V through the gradient of one chunk of GDN-2: do, U, Y of all tokens, and the rows of S and dS for the
// channels that the block takes. Each is copied once and serves all five products over V.
#pragma once
#include "chunk_scales.cuh"

constexpr int STATE_PITCH = K_BLOCK + PAD;                        // operands, of rows of S and dS and of the levels
constexpr int STATE_TILE = V_BLOCK * STATE_PITCH * OPERAND_BYTES; // bytes
constexpr int STAGE_BYTES = INPUT_TILE + 2 * OPERAND_TILE + 2 * STATE_TILE;

// A block of V in shared memory.
struct Stage {
    const INPUT* d_output;
    const operand *writes, *adjoints, *states, *d_states;
};
__device__ __forceinline__ Stage stage_at(const u8* at) {
    Stage stage;
    stage.d_output = (const INPUT*)at;
    stage.writes = (const operand*)(at + INPUT_TILE);
    stage.adjoints = stage.writes + CHUNK * OPERAND_PITCH;
    stage.states = stage.adjoints + CHUNK * OPERAND_PITCH;
    stage.d_states = stage.states + V_BLOCK * STATE_PITCH;
    return stage;
}

// `Rows` rows of `Bytes` bytes, from global to shared memory, by all threads; rows at and beyond `valid` become zero.
template <int Rows, int Bytes>
__device__ __forceinline__ void copy_tile(u32 to, int to_pitch, const void* from, int from_pitch, int valid) {
    constexpr int VECTORS = Bytes / 16;
#pragma unroll 2
    for (int i = threadIdx.x; i < Rows * VECTORS; i += THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * 16;
        const bool inside = row < valid;
        copy_async_16(to + row * to_pitch + column, (const u8*)from + (u32)((inside ? row : 0) * from_pitch + column), inside);
    }
}

// The blocks on their way.
struct Stream {
    const ChunkParams& p;
    long long d_output, values, states; // where the chunk and head begin in do, in U and Y, and the channels in S and dS
    u8* ring;
    int length; // tokens of the chunk
    int current;

    __device__ __forceinline__ void start(int block) const {
        if (block < BLOCKS) {
            const int v = block * V_BLOCK;
            u32 to = shared_address(ring + block % STAGES * STAGE_BYTES);
            copy_tile<CHUNK, V_BLOCK * (int)sizeof(INPUT)>(to, INPUT_PITCH * (int)sizeof(INPUT), p.d_o + d_output + v,
                                                           p.value_heads * VD * (int)sizeof(INPUT), length);
            to += INPUT_TILE;
            copy_tile<CHUNK, V_BLOCK * OPERAND_BYTES>(to, OPERAND_PITCH * OPERAND_BYTES, p.writes + values + v, VD * OPERAND_BYTES, CHUNK);
            to += OPERAND_TILE;
            copy_tile<CHUNK, V_BLOCK * OPERAND_BYTES>(to, OPERAND_PITCH * OPERAND_BYTES, p.adjoints + values + v, VD * OPERAND_BYTES, CHUNK);
            to += OPERAND_TILE;
            copy_tile<V_BLOCK, K_BLOCK * OPERAND_BYTES>(to, STATE_PITCH * OPERAND_BYTES, p.states + states + v * KD, KD * OPERAND_BYTES, V_BLOCK);
            to += STATE_TILE;
            copy_tile<V_BLOCK, K_BLOCK * OPERAND_BYTES>(to, STATE_PITCH * OPERAND_BYTES, p.d_states + states + v * KD, KD * OPERAND_BYTES, V_BLOCK);
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void begin() const {
        for (int i = 0; i < (STAGES == 1 ? 1 : STAGES - 1); ++i) start(i);
    }
    // Waits for the current block; with several stages, starts the one that takes the place of the block before it.
    __device__ __forceinline__ Stage arrive() const {
        copy_async_wait < STAGES == 1 ? 0 : STAGES - 2 > ();
        __syncthreads();
        if (STAGES > 1) start(current + STAGES - 1);
        return stage_at(ring + current % STAGES * STAGE_BYTES);
    }
    __device__ __forceinline__ void leave() {
        ++current;
        if (STAGES == 1) {
            __syncthreads();
            start(current);
        }
    }
};
