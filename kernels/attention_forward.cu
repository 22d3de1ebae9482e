// Causal softmax attention, forward. Per sequence and head, for queries i and keys j <= i:
//
//   s_ij = scale q_i . k_j     lse_i = ln sum_j e^{s_ij}     o_i = sum_j e^{s_ij - lse_i} v_j
//
// Shapes: q, k, v, o (B, T, H, d) with pitches of their own, lse (B, H, T).
//
// A block takes 128 queries of one head, a warp 16 of them, and walks over the keys by tiles of 64 from the first on. The
// scores are never stored: with m_i the largest score so far, l_i = sum e^{s_ij - m_i} and o_i are corrected by
// e^{m_i - m_i'} whenever m_i grows. The exponent is one multiply-add: 2^(c s - c m) with c = scale log2(e). Key 0 is seen
// by every query, so each has a score from the first tile on. The accumulators of the scores are the left operand of the
// product with the values as they are.
#include "attention.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int QUERIES = 16 * WARPS, KEYS = 64;
constexpr int TILE = KEYS * PITCH;
static_assert(16 * WARPS * PITCH <= 4 * TILE, "the output passes through the tiles of keys and values");

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM == 64 ? 2 : 1) attention_forward(const __grid_constant__ AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    operand* const tiles = (operand*)shared; // keys and values of this turn, keys and values of the next
    const Work work = work_of_block(p, (p.tokens + QUERIES - 1) / QUERIES, true);
    const Head keys = head_of(p.k, work, p.tokens), values = head_of(p.v, work, p.tokens);
    const int warp = threadIdx.x / 32;
    const int first = work.tile * QUERIES + 16 * warp; // query of the warp
    const int turns = (min((work.tile + 1) * QUERIES, p.tokens) + KEYS - 1) / KEYS;
    const float c = p.scale * LOG2_E;

    fetch_rows<KEYS, THREADS>(tiles, keys, 0, p.tokens);
    fetch_rows<KEYS, THREADS>(tiles + TILE, values, 0, p.tokens);
    copy_async_commit();
    Left query[D_TILES];
    load_rows(query, head_of(p.q, work, p.tokens), first, p.tokens);
    Rows16 output;
    clear(output);
    Softmax softmax = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};

    for (int turn = 0; turn < turns; ++turn) {
        copy_async_wait<0>();
        __syncthreads(); // the tiles are there, and nobody needs those of the turn before
        operand* const key_tile = tiles + turn % 2 * 2 * TILE;
        if (turn + 1 < turns) {
            operand* const next = tiles + (turn + 1) % 2 * 2 * TILE;
            fetch_rows<KEYS, THREADS>(next, keys, (turn + 1) * KEYS, p.tokens);
            fetch_rows<KEYS, THREADS>(next + TILE, values, (turn + 1) * KEYS, p.tokens);
        }
        copy_async_commit();
        if (turn * KEYS > first + 15) continue; // nothing that this warp sees

        float score[KEYS / 8][4];
        clear(score);
#pragma unroll
        for (int i = 0; i < D_TILES; ++i) product_nt(score, query[i], key_tile + 16 * i, PITCH);
        if ((turn + 1) * KEYS > first + 1) hide_later_keys(score, first, turn * KEYS);
        exponentiate<1>(score, softmax, output, c);
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            const Left probability = make_left(score[2 * k], score[2 * k + 1], 1.0f);
            product_nn(output, probability, key_tile + TILE + 16 * k * PITCH, PITCH);
        }
    }

    float inverse[2];
    finish_softmax(inverse, softmax, p, work, first);
    __syncthreads(); // all are done with the tiles
    store_rows(head_of(p.o, work, p.tokens), output, inverse[0], inverse[1], tiles + 16 * warp * PITCH, first, p.tokens);
}
