// What the kernels that make the gradients of one chunk share: the places of their warps, and the scales of what the sweeps
// have left in the workspace.
//
// A kernel defines COLUMN_WARPS first: the parts of the K columns. Warps are TILES groups of 16 rows times these. It takes
// V_BLOCK columns of V at a time through shared memory.
#pragma once
#include "chunk.cuh"

constexpr int WARPS = TILES * COLUMN_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int K_PART = K_BLOCK / COLUMN_WARPS;                             // columns of K of a warp
constexpr int SQUARE_PARTS = COLUMN_WARPS < TILES ? COLUMN_WARPS : TILES;  // parts of the columns of the squares;
constexpr int J_PART = CHUNK / SQUARE_PARTS;                               // warps beyond them have none
constexpr int BLOCKS = VD / V_BLOCK;       // blocks of V
constexpr int V_TILES = VD / 16;

constexpr int OPERAND_PITCH = V_BLOCK + PAD;                               // operands
constexpr int INPUT_PITCH = V_BLOCK + 16 / (int)sizeof(INPUT);             // elements of INPUT
constexpr int OPERAND_TILE = CHUNK * OPERAND_PITCH * OPERAND_BYTES;        // bytes
constexpr int INPUT_TILE = CHUNK * INPUT_PITCH * (int)sizeof(INPUT);
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
    int first_k;      // of the block's columns of K
    int first_column; // of the warp's columns among these
    int first_j;      // of its columns of the squares
    bool squares;     // whether it has any

    // Which halves of the chunk, of K and of the chunk those are in.
    __device__ __forceinline__ int row_half() const { return first_row / (CHUNK / 2); }
    __device__ __forceinline__ int column_half() const { return (first_k + first_column) / (KD / 2); }
    __device__ __forceinline__ int j_half() const { return first_j / (CHUNK / 2); }
};
// Blocks that share a chunk and value head are neighbours.
constexpr int K_BLOCKS = KD / K_BLOCK;
__device__ __forceinline__ int chunk_of_block() { return blockIdx.x / K_BLOCKS; }
__device__ __forceinline__ int first_k_of_block() { return K_BLOCKS == 1 ? 0 : blockIdx.x % K_BLOCKS * K_BLOCK; }
__device__ __forceinline__ Place place_of_warp() {
    Place at;
    at.warp = threadIdx.x / 32;
    at.lane = threadIdx.x & 31;
    at.row = at.lane / 4;
    at.quad = at.lane % 4;
    at.first_row = 16 * (at.warp % TILES);
    at.first_k = first_k_of_block();
    at.first_column = K_PART * (at.warp / TILES);
    at.squares = at.warp / TILES < SQUARE_PARTS;
    at.first_j = at.squares ? J_PART * (at.warp / TILES) : 0;
    if (CHANNELS) at.squares = at.squares && at.first_j <= at.first_row; // the others are above the diagonal
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
