// The stream of blocks of V through the kernel that makes the gradients of one chunk of GDN: first do, U, Y for the two
// squares dP = do U^T and dL = -Y U^T, then the left and right operands of do S^T, Y S^T and U dS^T.
#pragma once
#include "chunk_scales.cuh"

constexpr int ITEMS = 4 * BLOCKS;                       // what a value head streams
constexpr int UNROLLED = THREADS > 256 ? 1 : 4;         // steps over V whose operands are on their way at once
constexpr int LEFT_TILE = OPERAND_TILE > INPUT_TILE ? OPERAND_TILE : INPUT_TILE;
constexpr int SQUARES_STAGE = 2 * INPUT_TILE + 2 * OPERAND_TILE;
constexpr int PRODUCT_STAGE = LEFT_TILE + V_BLOCK * ROW_PITCH * OPERAND_BYTES;
constexpr int STAGE_BYTES = SQUARES_STAGE > PRODUCT_STAGE ? SQUARES_STAGE : PRODUCT_STAGE;

// Starts the copies of one item of the stream of a value head.
__device__ __forceinline__ void load_item(const ChunkParams& p, u8* stage, int chunk, int head, int item) {
    const long long square = (long long)chunk * p.value_heads + head;
    const int phase = item / BLOCKS, v = item % BLOCKS * V_BLOCK;
    const long long value_at = ((long long)p.chunk_token[chunk] * p.value_heads + head) * VD + v;
    const int value_pitch = p.value_heads * VD * (int)sizeof(INPUT);
    const int length = p.chunk_length[chunk];
    auto load_input = [&](u8* to, const INPUT* from) {
        copy_rows<THREADS>(to, INPUT_PITCH * sizeof(INPUT), from + value_at, value_pitch, CHUNK,
                           V_BLOCK * (int)sizeof(INPUT), length);
    };
    auto load_operand = [&](u8* to, const operand* from) {
        copy_rows<THREADS>(to, OPERAND_PITCH * OPERAND_BYTES, from + square * CHUNK * VD + v, VD * OPERAND_BYTES, CHUNK,
                           V_BLOCK * OPERAND_BYTES, CHUNK);
    };
    if (phase == 0) {
        load_input(stage, p.d_o);
        load_input(stage + INPUT_TILE, p.v);
        load_operand(stage + 2 * INPUT_TILE, p.writes);
        load_operand(stage + 2 * INPUT_TILE + OPERAND_TILE, p.adjoints);
    } else {
        if (phase == 1)
            load_input(stage, p.d_o);
        else
            load_operand(stage, phase == 2 ? p.adjoints : p.writes);
        copy_rows<THREADS>(stage + LEFT_TILE, ROW_PITCH * OPERAND_BYTES,
                           (phase == 3 ? p.d_states : p.states) + (square * VD + v) * KD, KD * OPERAND_BYTES, V_BLOCK,
                           KD * OPERAND_BYTES, V_BLOCK);
    }
    copy_async_commit();
}

// dP and -dL of the warp's rows and columns, without masks, from one block of V; v . Y along the way.
__device__ __forceinline__ void squares_of_block(const u8* stage, const StreamScales& s, const Place& at, int v,
                                                 float (&dp)[J_PART / 8][4], float (&dl)[J_PART / 8][4],
                                                 float (&dots)[2]) {
    const INPUT* d_o = (const INPUT*)stage;
    const INPUT* value = (const INPUT*)(stage + INPUT_TILE);
    const operand* writes = (const operand*)(stage + 2 * INPUT_TILE);
    const operand* adjoints = writes + CHUNK * OPERAND_PITCH;
#pragma unroll 1
    for (int c = 0; c < V_BLOCK / 16; ++c) {
        const int tile = v / 16 + c;
        const Left from_output = left_of_input(d_o + at.first_row * INPUT_PITCH + 16 * c,
                                               s.factors[D_SCORES][at.row_half()][at.j_half()][tile], at);
        Left from_adjoint = load_left(adjoints + at.first_row * OPERAND_PITCH + 16 * c, OPERAND_PITCH);
        scale_left(from_adjoint, s.factors[D_LOWER][at.row_half()][at.j_half()][tile]);
        const operand* right = writes + at.first_j * OPERAND_PITCH + 16 * c;
        product_nt(dp, from_output, right, OPERAND_PITCH);
        product_nt(dl, from_adjoint, right, OPERAND_PITCH);
        if (tile % SQUARE_PARTS == at.first_j / J_PART) { // the parts share the dots
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = at.first_row + at.row + 8 * half;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int column = 16 * c + 8 * n + 2 * at.quad;
                    const float2 y = load_pair(adjoints + r * OPERAND_PITCH + column);
                    const float2 x = load_two(value + r * INPUT_PITCH + column);
                    sum += x.x * y.x + x.y * y.y;
                }
                dots[half] += sum * s.scales[ADJOINTS][2 * tile + at.row_half()];
            }
        }
    }
}

// The stream of items, over the value heads that the block takes.
struct Stream {
    const ChunkParams& p;
    u8* ring;
    int chunk, first_head, items, current;

    __device__ __forceinline__ void start(int item) const {
        if (item < items)
            load_item(p, ring + item % STAGES * STAGE_BYTES, chunk, first_head + item / ITEMS, item % ITEMS);
        else
            copy_async_commit();
    }
    __device__ __forceinline__ void begin() const {
        for (int i = 0; i < (STAGES == 1 ? 1 : STAGES - 1); ++i) start(i);
    }
    // Waits for the current item; with several stages, starts the one that takes the place of the item before it.
    __device__ __forceinline__ const u8* arrive() const {
        copy_async_wait < STAGES == 1 ? 0 : STAGES - 2 > ();
        __syncthreads();
        if (STAGES > 1) start(current + STAGES - 1);
        return ring + current % STAGES * STAGE_BYTES;
    }
    __device__ __forceinline__ void leave() {
        ++current;
        if (STAGES == 1) {
            __syncthreads();
            start(current);
        }
    }
};

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A product of what streams through shared memory with a state.
template <Product Which>
__device__ __forceinline__ void product_with_state(float (&product)[K_PART / 8][4], const StreamScales& s, const Place& at,
                                                   Stream& stream) {
    clear(product);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; ++block) {
        const u8* stage = stream.arrive();
        const operand* right = (const operand*)(stage + LEFT_TILE) + at.first_column;
        const float* factors = s.factors[Which][at.row_half()][at.column_half()] + block * (V_BLOCK / 16);
        const INPUT* inputs = (const INPUT*)stage + at.first_row * INPUT_PITCH;
        const operand* operands = (const operand*)stage + at.first_row * OPERAND_PITCH;
#pragma unroll UNROLLED
        for (int c = 0; c < V_BLOCK / 16; ++c) {
            Left left;
            if (Which == OUTPUT_STATE) {
                left = left_of_input(inputs + 16 * c, factors[c], at);
            } else {
                left = load_left(operands + 16 * c, OPERAND_PITCH);
                scale_left(left, factors[c]);
            }
            product_nn(product, left, right + 16 * c * ROW_PITCH, ROW_PITCH);
        }
        stream.leave();
    }
}
