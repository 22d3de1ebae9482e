// The stream of blocks of V through the kernels that make the gradients of one chunk: first do, U, Y for the two squares
// dP = do U^T and dL = -Y U^T, then the left and right operands of do S^T, Y S^T and U dS^T.
//
// A kernel defines COLUMN_WARPS first: the parts of the K columns. Warps are TILES groups of 16 rows times these.
#pragma once
#include "chunk.cuh"

constexpr int WARPS = TILES * COLUMN_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int K_PART = KD / COLUMN_WARPS;                                  // columns of K of a warp
constexpr int SQUARE_PARTS = COLUMN_WARPS < TILES ? COLUMN_WARPS : TILES;  // parts of the columns of the squares;
constexpr int J_PART = CHUNK / SQUARE_PARTS;                               // warps beyond them have none
constexpr int BLOCKS = VD / V_BLOCK;       // blocks of V
constexpr int ITEMS = 4 * BLOCKS;          // what a value head streams
constexpr int V_TILES = VD / 16;
constexpr int UNROLLED = THREADS > 256 ? 1 : 4; // steps over V whose operands are on their way at once

constexpr int OPERAND_PITCH = V_BLOCK + PAD;                               // operands
constexpr int INPUT_PITCH = V_BLOCK + 16 / (int)sizeof(INPUT);             // elements of INPUT
constexpr int OPERAND_TILE = CHUNK * OPERAND_PITCH * OPERAND_BYTES;        // bytes
constexpr int INPUT_TILE = CHUNK * INPUT_PITCH * (int)sizeof(INPUT);
constexpr int LEFT_TILE = OPERAND_TILE > INPUT_TILE ? OPERAND_TILE : INPUT_TILE;
constexpr int SQUARES_INPUTS = CHANNELS ? 1 : 2; // do, and v for GDN
constexpr int SQUARES_STAGE = SQUARES_INPUTS * INPUT_TILE + 2 * OPERAND_TILE;
constexpr int PRODUCT_STAGE = LEFT_TILE + V_BLOCK * ROW_PITCH * OPERAND_BYTES;
constexpr int STAGE_BYTES = SQUARES_STAGE > PRODUCT_STAGE ? SQUARES_STAGE : PRODUCT_STAGE;
static_assert(VD % V_BLOCK == 0 && V_BLOCK % 16 == 0, "blocks of V are whole tiles");

// Tensors of the workspace that carry scales.
enum Tensor { D_OUTPUT, WRITES, ADJOINTS, STATES, D_STATES, TENSORS };
// Products over V, with their operands. do is not kept as operands, so its scale is only that of the largest element.
enum Product { D_SCORES, D_LOWER, OUTPUT_STATE, ADJOINT_STATE, WRITE_D_STATE, PRODUCTS };
constexpr __device__ Tensor LEFT_OF[PRODUCTS] = {D_OUTPUT, ADJOINTS, D_OUTPUT, ADJOINTS, WRITES};
constexpr __device__ Tensor RIGHT_OF[PRODUCTS] = {WRITES, WRITES, STATES, STATES, D_STATES};

// The scales of the workspace by tiles of V and halves (of K for the states, of the chunk for the others), the largest of
// each tensor, and what brings the left operand of a product to the largest scales of both its operands.
struct StreamScales {
    float scales[TENSORS][2 * V_TILES];
    float most[TENSORS];
    float factors[PRODUCTS][2][2][V_TILES]; // half of the left operand's rows, half of the right operand
};

struct Place {
    int warp, lane, row, quad;
    int first_row;    // of the warp's 16 rows
    int first_column; // of the warp's columns of K
    int first_j;      // of its columns of the squares
    bool squares;     // whether it has any

    // Which halves of the chunk, of K and of the chunk those are in.
    __device__ __forceinline__ int row_half() const { return first_row / (CHUNK / 2); }
    __device__ __forceinline__ int column_half() const { return first_column / (KD / 2); }
    __device__ __forceinline__ int j_half() const { return first_j / (CHUNK / 2); }
};
__device__ __forceinline__ Place place_of_warp() {
    Place at;
    at.warp = threadIdx.x / 32;
    at.lane = threadIdx.x & 31;
    at.row = at.lane / 4;
    at.quad = at.lane % 4;
    at.first_row = 16 * (at.warp % TILES);
    at.first_column = K_PART * (at.warp / TILES);
    at.squares = at.warp / TILES < SQUARE_PARTS;
    at.first_j = at.squares ? J_PART * (at.warp / TILES) : 0;
    return at;
}

// The scales of one value head and the factors that follow from them, by all threads.
__device__ __forceinline__ void load_scales(const ChunkParams& p, StreamScales& s, long long square) {
    const float* from[TENSORS] = {p.d_o_scales, p.write_scales, p.adjoint_scales, p.state_scales, p.d_state_scales};
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
    for (int tensor = 0; tensor < TENSORS; ++tensor) {
        if (tensor % WARPS != warp) continue;
        const float scale = lane < 2 * V_TILES ? from[tensor][square * 2 * V_TILES + lane] : 0.0f;
        if (lane < 2 * V_TILES) s.scales[tensor][lane] = scale;
        const float most = warp_max(scale);
        if (lane == 0) s.most[tensor] = most;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < PRODUCTS * 4 * V_TILES; i += THREADS) {
        const int product = i / (4 * V_TILES), tile = i % V_TILES, row_half = i / (2 * V_TILES) % 2, half = i / V_TILES % 2;
        const Tensor left = LEFT_OF[product], right = RIGHT_OF[product];
        const float of_left = left == D_OUTPUT ? 1.0f : s.scales[left][2 * tile + row_half];
        s.factors[product][row_half][half][tile] =
            of_left * inverse_of(s.most[left]) * (s.scales[right][2 * tile + half] * inverse_of(s.most[right]));
    }
}

// A 16 x 16 tile of an input, times `factor`, as a left operand.
__device__ __forceinline__ Left left_of_input(const INPUT* from, float factor, const Place& at) {
    float tiles[2][4];
    if constexpr (sizeof(INPUT) == 2) {
        u32 pairs[4];
        load_matrices(pairs, shared_address(from + (at.lane & 15) * INPUT_PITCH + (at.lane >> 4) * 8));
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            INPUT x;
            *(u16*)&x = (u16)(pairs[e / 2] >> (16 * (e % 2)));
            tiles[e / 4][e % 4] = to_float(x);
        }
    } else {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 pair = load_two(from + (at.row + 8 * half) * INPUT_PITCH + 8 * n + 2 * at.quad);
                tiles[n][2 * half] = pair.x;
                tiles[n][2 * half + 1] = pair.y;
            }
    }
    return make_left(tiles[0], tiles[1], factor);
}

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
        if (!CHANNELS) load_input(stage + INPUT_TILE, p.v);
        load_operand(stage + SQUARES_INPUTS * INPUT_TILE, p.writes);
        load_operand(stage + SQUARES_INPUTS * INPUT_TILE + OPERAND_TILE, p.adjoints);
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

// dP and -dL of the warp's rows and columns, without masks, from one block of V; for GDN v . Y along the way.
__device__ __forceinline__ void squares_of_block(const u8* stage, const StreamScales& s, const Place& at, int v,
                                                 float (&dp)[J_PART / 8][4], float (&dl)[J_PART / 8][4],
                                                 float (&dots)[2]) {
    const INPUT* d_o = (const INPUT*)stage;
    const INPUT* value = (const INPUT*)(stage + INPUT_TILE);
    const operand* writes = (const operand*)(stage + SQUARES_INPUTS * INPUT_TILE);
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
        if (!CHANNELS && tile % SQUARE_PARTS == at.first_j / J_PART) { // the parts share the dots
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
