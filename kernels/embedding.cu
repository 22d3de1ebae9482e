// The embedding:  y_n = W_{token_n}      dW_v = sum_{n: token_n = v} dy_n
//
//   W (vocabulary, D), y, dy (rows, D) in bf16; dW (vocabulary, D) in binary32
//
// For the gradient the rows are sorted by their tokens beforehand, rows of one token in their order: `order` (rows), and
// `starts` (vocabulary + 1), where each token begins in it. A warp of embedding_pieces walks along a *piece* of PIECE places
// of that order. A token that lies in one piece is done with it; of one that goes on beyond a piece each piece leaves a sum,
// and embedding_rows adds these up in their order. It also clears the tokens that did not come. So the work is even, however
// often a token comes, and each sum has one order.
#include "layer.cuh"

struct EmbeddingForward {
    const bf16* weight; // (vocabulary, D)
    const int* tokens;  // (rows)
    bf16* y;            // (rows, D)
    u32 count;          // accesses to y, rows D / 8
    u32 vectors;        // accesses to a row, D / 8
};

struct EmbeddingBackward {
    const bf16* dy;    // (rows, D)
    const int* tokens; // (rows)
    const int* order;  // (rows): numbers of rows, by token
    const int* starts; // (vocabulary + 1)
    float* parts;      // (pieces, 2, D): of the token that came from the piece before, and of the one that goes on
    float* dweight;    // (vocabulary, D)
    int rows;
    int vocabulary;
    int dim; // D
};

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int PIECE = 32;  // places of the order
constexpr int BATCH = 4;   // of them in flight at once

// Grid: count / THREADS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) embedding_forward(const __grid_constant__ EmbeddingForward p) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const u32 row = i / p.vectors, vector = i - row * p.vectors;
    wait_for_kernel_before();
    *(uint4*)(p.y + (u64)WIDE * i) = load_packed(p.weight + WIDE * ((u64)p.tokens[row] * p.vectors + vector));
}

// Where the sum of a token over a piece belongs.
__device__ __forceinline__ float* sum_of(const EmbeddingBackward& p, int token, int piece) {
    if (p.starts[token] < piece * PIECE) return p.parts + 2ll * piece * p.dim;
    if (p.starts[token + 1] > (piece + 1) * PIECE) return p.parts + (2ll * piece + 1) * p.dim;
    return p.dweight + (long long)token * p.dim;
}

// Grid: pieces / WARPS rounded up, D / 256 rounded up. A warp takes 256 columns of a piece.
extern "C" __global__ void __launch_bounds__(THREADS) embedding_pieces(const __grid_constant__ EmbeddingBackward p) {
    const int piece = blockIdx.x * WARPS + threadIdx.x / 32, first = piece * PIECE, end = min(first + PIECE, p.rows);
    const int column = WIDE * (blockIdx.y * 32 + threadIdx.x % 32);
    wait_for_kernel_before();
    if (first >= p.rows || column >= p.dim) return;
    float sum[WIDE];
    clear(sum);
    int held = p.tokens[p.order[first]];
#pragma unroll 1
    for (int batch = first; batch < end; batch += BATCH) {
        uint4 dy[BATCH];
        int token[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (batch + i < end) {
                const int row = p.order[batch + i];
                token[i] = p.tokens[row];
                dy[i] = load_packed(p.dy + (long long)row * p.dim + column);
            }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (batch + i >= end) break;
            if (token[i] != held) {
                store_eight(sum_of(p, held, piece) + column, sum);
                held = token[i];
                clear(sum);
            }
            float x[WIDE];
            unpack(dy[i], x);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) sum[e] += x[e];
        }
    }
    store_eight(sum_of(p, held, piece) + column, sum);
}

// Grid: vocabulary / WARPS rounded up. A warp takes a row of dW.
extern "C" __global__ void __launch_bounds__(THREADS) embedding_rows(const __grid_constant__ EmbeddingBackward p) {
    const int token = blockIdx.x * WARPS + threadIdx.x / 32;
    wait_for_kernel_before();
    if (token >= p.vocabulary) return;
    const int start = p.starts[token], end = p.starts[token + 1];
    const int first = start / PIECE, last = end > start ? (end - 1) / PIECE : first;
    if (end > start && first == last) return;
    for (int column = WIDE * (threadIdx.x % 32); column < p.dim; column += WIDE * 32) {
        float sum[WIDE];
        clear(sum);
        if (end > start)
#pragma unroll 4
            for (int piece = first; piece <= last; ++piece) {
                // In the first piece the token may begin at its first place, and then comes from no piece before.
                const int kind = piece == first ? 1 : 0;
                float part[WIDE];
                load_eight(p.parts + (2ll * piece + kind) * p.dim + column, part);
#pragma unroll
                for (int e = 0; e < WIDE; ++e) sum[e] += part[e];
            }
        store_eight(p.dweight + (long long)token * p.dim + column, sum);
    }
}
