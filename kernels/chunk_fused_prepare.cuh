// The preparer of the fused forward (chunk_fused_hopper.cu): what chunk_prepare.cu does, by one warpgroup a chunk ahead.
#pragma once
#include "chunk_fused.cuh"

#if HOPPER
// Turns a row of q or k into operands where it lies: half a row to a thread. Rows at and beyond `length` become zero.
__device__ __forceinline__ void convert_row(u32 thread, u8* tiles, float* coefficients, int length, float epsilon) {
    constexpr int OWN = KD / 16; // pieces of 8 numbers
    const u32 row = thread / 2, half = thread % 2;
    uint4 pieces[OWN];
    u8* at[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u32 piece = half * OWN + (i ^ (half * (OWN / 2))); // the two threads of a row meet different banks
        at[i] = tiles + piece / 8 * TILE_BYTES + place_in_tile(row, piece % 8 * 8);
        pieces[i] = *(const uint4*)at[i];
    }
    if (length < CHUNK && (int)row >= length) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) pieces[i] = uint4{};
    }
    u32 most[4] = {}; // four chains, not one: each step waits for the one before
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        most[0] = larger_pair(most[0], pieces[i].x);
        most[1] = larger_pair(most[1], pieces[i].y);
        most[2] = larger_pair(most[2], pieces[i].z);
        most[3] = larger_pair(most[3], pieces[i].w);
    }
    const u32 largest_pair = larger_pair(larger_pair(most[0], most[1]), larger_pair(most[2], most[3]));
    float largest = fmaxf(first_of(largest_pair), second_of(largest_pair));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    const float factor = row_factor(largest);
    float coefficient = inverse_of(factor);
    if (epsilon >= 0.0f) {
        // 1 / sqrt(|x|^2 + epsilon), in the units of the scaled row.
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float x = first_of(words[w]) * factor, y = second_of(words[w]) * factor;
                squares = fmaf(y, y, fmaf(x, x, squares));
            }
        }
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        coefficient = (int)row < length ? rsqrtf(squares + epsilon * factor * factor) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack_16(first_of(words[w]) * factor, second_of(words[w]) * factor);
        *(uint4*)at[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (half == 0) coefficients[row] = coefficient;
}

// Starts acc = A B^T over the columns of K of two tiles of rows.
__device__ __forceinline__ void start_rows_product(float (&acc)[8][4], u32 left, u32 right) {
    const u64 a = tile_descriptor(left), b = tile_descriptor(right);
#pragma unroll
    for (int k = 0; k < KD; k += 16) {
        const u64 next = (k / SPAN * TILE_BYTES + 2 * (k % SPAN)) >> 4; // descriptors count in 16 bytes
        if (k == 0) warpgroup_product_nt<0>(acc, a + next, b + next);
        else warpgroup_product_nt<1>(acc, a + next, b + next);
    }
}

// The blocks of T below the diagonal in block column `column`, by one warp; the diagonal blocks are there. As invert_column.
__device__ __forceinline__ void invert_column_of_tile(const operand* lower, u32 inverse, u32 column, u32 lane) {
    // Rows of right operands; the transposed of these are left operands.
    const u32 matrix_row = (lane & 7) + (lane >> 4) * 8, matrix_column = ((lane >> 3) & 1) * 8;
    const u32 own = inverse + 16 * column * SPAN_BYTES;
    const u32 from = shared_address(lower) + (16 * column * (SQUARE_PITCH + 1) + matrix_row * SQUARE_PITCH + matrix_column) * OPERAND_BYTES;
    Left above[TILES]; // T_mj^T for m = j, j + 1, ...
    load_matrices_transposed(above[0].r, own + place_in_tile(matrix_row, 16 * column + matrix_column));
#pragma unroll
    for (int d = 1; d < TILES; ++d) {
        if ((int)column + d >= TILES) break;
        float sum[2][4], block[2][4];
        clear(sum);
        clear(block);
#pragma unroll
        for (int m = 0; m < d; ++m) {
            u32 right[4];
            load_matrices(right, from + 16 * (d * SQUARE_PITCH + m) * OPERAND_BYTES);
            mma_16816(sum[0], above[m].r, right[0], right[1]);
            mma_16816(sum[1], above[m].r, right[2], right[3]);
        }
        const Left left = make_left(sum[0], sum[1], -1.0f);
        u32 diagonal[4];
        load_matrices(diagonal, own + 16 * d * SPAN_BYTES + place_in_tile(matrix_row, 16 * (column + d) + matrix_column));
        mma_16816(block[0], left.r, diagonal[0], diagonal[1]);
        mma_16816(block[1], left.r, diagonal[2], diagonal[3]);
        above[d] = make_left(block[0], block[1], 1.0f);
        // The rows of `above` are columns of T.
        store_matrices_transposed(own + 16 * d * SPAN_BYTES + place_in_tile(matrix_row, 16 * column + matrix_column), above[d].r);
    }
}

// Volatile: loaded all at once, a block would not fit into the registers.
__device__ __forceinline__ void load_four(float* x, const float* from) {
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(shared_address(from)));
}

// A column of (I + block)^-1 for a strictly lower triangular block, element (i, j) at [j][i].
__device__ __forceinline__ void invert_block(const float (&block)[16][16], u32 column, float (&x)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < 15; ++j) {
        float below[16];
#pragma unroll
        for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
            load_four(below + i, &block[j][i]);
        }
#pragma unroll
        for (int i = j + 1; i < 16; ++i) x[i] = fmaf(-below[i], x[j], x[i]);
    }
}

template <int Bytes> __device__ __forceinline__ void clear_tile(Tile* tile) {
    for (int i = 16 * (threadIdx.x - CONSUMER_THREADS); i < Bytes; i += 16 * 128) *(uint4*)((u8*)tile + i) = uint4{};
}

// The preparer.
__device__ __forceinline__ void prepare(const Block& block) {
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    u32 thread = threadIdx.x - CONSUMER_THREADS;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), turns = block.turns();
    constexpr int GATES_WARP = TILES - 1; // it has no block below the diagonal
    // Above the diagonal blocks nothing is ever written.
    clear_tile<READY * (int)TILE_BYTES>(s.inverse);
    clear_tile<READY * (int)TILE_BYTES>(s.scores);
    if (warp == GATES_WARP && turns > 0) {
        const OwnGates own = load_gates(p, block.token_of(0), block.length_of(0), block.head);
        prepare_gates(p, s.gates[0], own, block.length_of(0), block.head);
    }

#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        // To the compiler another number in every turn: addresses that follow from it would take registers all the time.
        thread = __shfl_xor_sync(0xffffffffu, thread, 0);
        const u32 lane = thread & 31, row = lane / 4, quad = lane % 4;
        const int length = block.length_of(turn), slot = turn % READY;
        const u32 first = 16 * warp;
        OwnGates next_gates = {};
        if (warp == GATES_WARP && turn + 1 < turns)
            next_gates = load_gates(p, block.token_of(turn + 1), block.length_of(turn + 1), block.head);
        if (turn >= READY) barrier_wait(s.used + slot, (turn / READY - 1) & 1);
        barrier_wait(s.filled + turn % TURNS, turn / TURNS & 1);

        u8* const tiles = s.turns[turn % TURNS][0].bytes;
        float *const key = s.key[turn % 2], *const query = s.query[turn % 2];
#pragma unroll 1 // both at once do not fit into the registers
        for (int kind = 0; kind < (block.queries ? 2 : 1); ++kind)
            convert_row(thread, tiles + kind * QUERIES_AT, kind == 0 ? key : query, length, p.norm_epsilon);
        fence_shared_stores();
        warpgroup_barrier<PREPARED_BARRIER>();

        float product[8][4]; // K' K'^T, then Q' K'^T
        const u32 keys = shared_address(tiles), inverse = shared_address(s.inverse + slot);
        warpgroup_fence();
        start_rows_product(product, keys, keys);
        warpgroup_commit();
        // e^{G_i - G_j} where i and j are in different blocks is e^{G_i - G_m} e^{G_m - G_j}, m the first token of i's.
        const Gates& gates = s.gates[turn % 2];
        float row_decay[2], row_factor[2], own_decay[2][4], before[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) { // zero from the warp's own block on
            const u32 j = lane + 32 * half;
            const float decay = decay_between(gates, first, min(j, first)) * key[j];
            before[half] = j < first ? decay : 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 i = first + row + 8 * half;
            row_decay[half] = decay_between(gates, i, first);
            row_factor[half] = gates.beta[i] * key[i];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 j = first + 8 * (e / 2) + 2 * quad + e % 2;
                const float decay = decay_between(gates, i, min(i, j)) * key[j];
                own_decay[half][e] = i >= j ? decay : 0.0f;
            }
        }
        const u32 own_token = thread % CHUNK;
        float values[MOST];
        coefficients_of(p, gates, key[own_token], block.queries ? query[own_token] : 0.0f, own_token, values);
        // All loads come before the first store: the compiler cannot know that they are different places.
        s.column_decay[warp][lane] = before[0];
        s.column_decay[warp][lane + 32] = before[1];
        float* const to = s.coefficients[slot] + own_token;
        if (thread < CHUNK) {
            to[BETA * CHUNK] = values[BETA];
            to[READ * CHUNK] = values[READ];
            to[DECAY * CHUNK] = values[DECAY];
        } else {
            to[QUERY * CHUNK] = values[QUERY];
            to[WRITE * CHUNK] = values[WRITE];
        }
        __syncwarp();
        // Multiplies by the decays: rows of the warp, columns up to the diagonal.
        auto decay_all = [&] {
            float2 column[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) column[n] = *(const float2*)(s.column_decay[warp] + 8 * n + 2 * quad);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (n / 2 > warp) break;
                const bool own = n / 2 == warp;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    product[n][2 * half] *= own ? own_decay[half][n % 2 * 2] : row_decay[half] * column[n].x;
                    product[n][2 * half + 1] *= own ? own_decay[half][n % 2 * 2 + 1] : row_decay[half] * column[n].y;
                }
            }
        };
        warpgroup_wait<0>();
        hold(product);
        decay_all();
#pragma unroll
        for (int block_column = 0; block_column < TILES; ++block_column) {
            const bool own = block_column == warp;
            if (block_column > warp) break;
#pragma unroll
            for (int n = 2 * block_column; n < 2 * block_column + 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 pair = make_float2(product[n][2 * half] * row_factor[half], product[n][2 * half + 1] * row_factor[half]);
                    const u32 i = row + 8 * half, j = 8 * (n % 2) + 2 * quad;
                    if (own) { // from i = j on nobody reads
                        s.diagonal[warp][j][i] = pair.x;
                        s.diagonal[warp][j + 1][i] = pair.y;
                    } else
                        store_pair(s.lower + (first + i) * SQUARE_PITCH + 16 * block_column + j, pair.x, pair.y);
                }
        }
        if (block.queries) {
            hold(product);
            warpgroup_fence();
            start_rows_product(product, keys + QUERIES_AT, keys);
            warpgroup_commit();
        }
        // The chunk before the last has been used when this one is half done: its place is free for the next copies.
        if (thread == 0 && turn > 0) {
            if (turn >= 2) barrier_wait(s.used + (turn - 2) % READY, (turn - 2) / READY & 1);
            block.fill(turn + 1);
        }
        __syncwarp();
        {
            float x[16];
            invert_block(s.diagonal[warp], lane % 16, x);
            if (lane < 16) {
                u8* const rows = s.inverse[slot].bytes + first * SPAN_BYTES;
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    *(operand*)(rows + place_in_tile(i, first + lane)) = (operand)pack_16(x[i], x[i]);
            }
        }
        if (block.queries) {
            warpgroup_wait<0>();
            hold(product);
            decay_all();
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (n / 2 > warp) break;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *(u32*)(s.scores[slot].bytes + place_in_tile(first + row + 8 * half, 8 * n + 2 * quad)) =
                        pack_16(product[n][2 * half], product[n][2 * half + 1]);
            }
        }
        warpgroup_barrier<PREPARED_BARRIER>();
        if (warp < GATES_WARP) invert_column_of_tile(s.lower, inverse, warp, lane);
        fence_shared_stores();
        __syncwarp();
        if (lane == 0) barrier_arrive(s.ready + slot);
        if (warp == GATES_WARP && turn + 1 < turns)
            prepare_gates(p, s.gates[(turn + 1) % 2], next_gates, block.length_of(turn + 1), block.head);
    }
}
#endif
