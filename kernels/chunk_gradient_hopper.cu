// Last step of the backward of the chunk form of GDN for Hopper: what chunk_gradient.cu does, by products of whole warpgroups.
//
//   dP = tril(do U^T)      dL = -stril(Y U^T)
//   dq = s (e^G (do S^T) + (dP E) k)
//   dk = beta (-e^G (Y S^T) + (dL E) k) + (dP E)^T s q + (dL E)^T (beta k) + e^{G_C - G} (U dS^T)
//
// with dg and dbeta as there. The workspace of chunk_prepare.cu, chunk_states and chunk_backward.cu, v, do
//   ->  dq, dk (T, HK, K), dg, dbeta (T, HV)
//
// There is a block for each multiprocessor. It takes chunks and q/k heads one after the other, and of these the value heads of
// the group; dq and dk stay in registers over a group. Its warpgroups have three roles:
//
//   queries   dP, do S^T and dq; hands dP E to the keys in shared memory, with the weights of the rows
//   keys      dL, Y S^T, U dS^T and dk
//   sums      v . Y, <dS, S>, dg and dbeta, of what the others have summed
//
// The last warp that has read a place in shared memory has the copy engine fill it again.
//
// Left operands come from shared memory through registers, where they get the scales of their columns of V.
// The two scales of a tile of U, S and dS are the same (chunk_sweep_hopper.cu, chunk_backward.cu); those of Y may differ.
#define SPLIT 1
#define GROUPS 4
#define STAGES 1
#include "chunk_hopper.cuh"

struct ChunkGradientParams {
    // Tiles of 64 columns: (64, 1, rows, columns / 64) of the workspace, (64, HV, T, V / 64) of do.
    TensorMap queries, keys, d_o, writes, adjoints, states, d_states;
    ChunkParams chunk;
};

constexpr int ALL_THREADS = 3 * 128;
#if HOPPER
static_assert(MODE == MODE_F16 && !CHANNELS && VD <= 128, "operands are f16, and tiles of a chunk fit into shared memory");

constexpr int V_SPANS = VD / SPAN, V_TILES = VD / 16;
constexpr int ROLE_REGISTERS = 216, SUMS_REGISTERS = 72; // of a thread
constexpr int TURNS = 2; // chunks whose rows of do, U and Y are in shared memory at once

// Tensors of the workspace that carry scales.
enum Tensor { D_OUTPUT, WRITES, ADJOINTS, STATES, D_STATES, TENSORS };

// What the first two roles leave for the third.
struct RoleSums {
    float query_dots[CHUNK];      // s q_i . e^{G_i} (do_i S^T)
    float key_dots[CHUNK];        // k_i . e^{G_i} (Y_i S^T)
    float write_dots[CHUNK];      // k_i . e^{G_C - G_i} (U_i dS^T)
    float overlap_dots[CHUNK];    // sum_j dL_ij L_ij / beta_i
    float row_sums[2][CHUNK];     // of P dP, of L dL
    float column_sums[2][4][CHUNK]; // for each warp
    float value_dots[CHUNK];      // v_i . Y_i
    float state_dots[4];          // parts of <dS, S>
};
struct Shared {
    Tile queries[SPANS], keys[SPANS];
    Tile d_o[TURNS][V_SPANS], writes[TURNS][V_SPANS], adjoints[TURNS][V_SPANS];
    Tile states[V_SPANS][SPANS], d_states[V_SPANS][SPANS];
    Tile squares[2]; // of each role, dP E and dL E with the weights of their rows,
    float coefficients[TURNS][COEFFICIENT_NUMBERS];
    float scales[TURNS][TENSORS][2 * V_TILES];
    RoleSums sums[TURNS];
    float largest[TURNS][2][2][4]; // of the squares with the weights of their columns and rows, for each warp
    float square_inverse[2];        // and what turns them back
    Barrier rows_filled[TURNS], tiles_filled, states_filled, d_states_filled; // by the copies
    Barrier scores_ready, scores_free;                                        // from the queries to the keys and back
    Barrier sums_ready[TURNS];
    u32 rows_left[TURNS], tiles_left, states_left, d_states_left; // warps that have read them
};
static_assert(sizeof(Shared) + 1024 <= (2 * SPANS + 3 * TURNS * V_SPANS + 2 * V_SPANS * SPANS + 2) * TILE_BYTES + 18 * 1024,
              "the launch has as much");

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A place in the list of what a block computes: a value head of a chunk.
struct Item {
    const ChunkParams& p;
    int turn = 0, tile = 0; // counted over all value heads, over chunks and q/k heads
    int at, member;         // chunk and q/k head, value head of the group

    __device__ __forceinline__ explicit Item(const ChunkParams& p) : p(p), at(blockIdx.x), member(0) {}
    __device__ __forceinline__ int group() const { return p.value_heads / p.qk_heads; }
    __device__ __forceinline__ bool there() const { return at < p.chunks * p.qk_heads; }
    __device__ __forceinline__ bool first() const { return member == 0; }
    __device__ __forceinline__ bool last() const { return member == group() - 1; }
    __device__ __forceinline__ int chunk() const { return at / p.qk_heads; }
    __device__ __forceinline__ int qk_head() const { return at % p.qk_heads; }
    __device__ __forceinline__ int head() const { return qk_head() * group() + member; }
    __device__ __forceinline__ long long square() const { return (long long)chunk() * p.value_heads + head(); }
    __device__ __forceinline__ int stage() const { return turn % TURNS; }
    __device__ __forceinline__ u32 stage_parity() const { return turn / TURNS & 1; }
    __device__ __forceinline__ Item after(int turns) const {
        Item item = *this;
        for (int i = 0; i < turns; ++i) item.next();
        return item;
    }
    __device__ __forceinline__ void next() {
        ++turn;
        if (++member == group()) {
            member = 0;
            ++tile;
            at += gridDim.x;
        }
    }
};

// What the first two roles know of themselves.
enum { QUERIES, KEYS };
struct Role {
    u32 role, warp, lane, quad;
    u32 rows[2]; // of the chunk: those of the thread's accumulators
    __device__ __forceinline__ Role()
        : role(threadIdx.x / 128), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), quad(lane % 4),
          rows{16 * warp + lane / 4, 16 * warp + lane / 4 + 8} {}
    // Waits for all warps of the role.
    __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(role + 1) : "memory"); }
};

// The largest scale of a tensor.
__device__ __forceinline__ float largest_scale(const float (&scales)[2 * V_TILES], u32 lane) {
    return warp_max(scales[lane % (2 * V_TILES)]);
}

// The rows of a warp of a tensor (tokens, V) in tiles as left operands, each 16 columns times the factor of the lane of that
// number. Of an input rows at and beyond `valid` are zero.
__device__ __forceinline__ void load_left_rows(Left (&left)[V_TILES], u32 tiles, float factor, bool input, u32 valid,
                                               const LeftPlace& place, const Role& at) {
#pragma unroll
    for (int c = 0; c < V_TILES; ++c) load_matrices(left[c].r, tiles + c / 4 * TILE_BYTES + place(c % 4));
    if (input) {
#pragma unroll
        for (int c = 0; c < V_TILES; ++c) {
            const float of_tile = __shfl_sync(0xffffffffu, factor, c);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 pair = at.rows[i % 2] < valid ? left[c].r[i] : 0;
                left[c].r[i] = pack_16(first_of(pair) * of_tile, second_of(pair) * of_tile);
            }
        }
    } else {
        const u32 both = pack_16(factor, factor);
#pragma unroll
        for (int c = 0; c < V_TILES; ++c) {
            const u32 of_tile = __shfl_sync(0xffffffffu, both, c);
#pragma unroll
            for (int i = 0; i < 4; ++i) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(left[c].r[i]) : "r"(of_tile));
        }
    }
}

// product = left * (tiles of V rows and K columns)
__device__ __forceinline__ void start_product_over_v(OwnState& product, const Left (&left)[V_TILES], u32 tiles) {
#pragma unroll
    for (int c = 0; c < V_TILES; ++c) {
        const u64 b = tile_descriptor_transposed(tiles + c / 4 * SPANS * TILE_BYTES, TILE_BYTES) + (c % 4 * 16 * SPAN_BYTES >> 4);
        if (c == 0) warpgroup_product_nn<0>(product, left[c], b);
        else warpgroup_product_nn<1>(product, left[c], b);
    }
}
// product = left * (tiles of tokens and K columns)
__device__ __forceinline__ void start_product_over_tokens(OwnState& product, const Left (&left)[4], u32 tiles) {
    const u64 b = tile_descriptor_transposed(tiles, TILE_BYTES);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (c == 0) warpgroup_product_nn<0>(product, left[c], b);
        else warpgroup_product_nn<1>(product, left[c], b + (16 * c * SPAN_BYTES >> 4));
    }
}
__device__ __forceinline__ void finish_product(OwnState& product) {
    warpgroup_commit();
    warpgroup_wait<0>();
    hold(product);
}
// total += weight * product, where the weights are those of the thread's two rows
__device__ __forceinline__ void add_rows(OwnState& total, const OwnState& product, float first, float second) {
#pragma unroll
    for (int n = 0; n < KD / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) total[n][e] = fmaf(product[n][e], e < 2 ? first : second, total[n][e]);
}
// The dots of the thread's two rows of a product with those rows of K' or Q', to all lanes of the quad.
__device__ __forceinline__ void row_dots(const OwnState& product, u32 tiles, const LeftPlace& place, float (&dots)[2]) {
    float sums[4] = {};
#pragma unroll
    for (int c = 0; c < KD / 16; ++c) {
        u32 pairs[4];
        load_matrices(pairs, tiles + c / 4 * TILE_BYTES + place(c % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&of)[4] = product[2 * c + i / 2];
            const float x = from_operand((operand)pairs[i]), y = from_operand((operand)(pairs[i] >> 16));
            sums[i] = fmaf(of[2 * (i % 2)], x, fmaf(of[2 * (i % 2) + 1], y, sums[i]));
        }
    }
    dots[0] = quad_sum(sums[0] + sums[2]);
    dots[1] = quad_sum(sums[1] + sums[3]);
}

// A square of the chunk that a role has the gradient of, and what it makes of it.
struct Square {
    OwnTokens d;
    u32 value[8][2]; // of the square itself: pairs of columns of the thread's rows
    float inverse; // what turns the product with the weights of columns back
};
// Asks for the square; blocks above the diagonal are not read.
__device__ __forceinline__ void load_square(Square& square, const operand* from, const Role& at) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        if (n / 2 > at.warp) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            square.value[n][half] = *(const u32*)(from + at.rows[half] * SQUARE_PITCH + 8 * n + 2 * at.quad);
    }
}
// Half of what a lane sums, with what another lane `distance` away has of it, which takes the other half.
template <int N> __device__ __forceinline__ void halve_sums(float (&half)[N][2], const float (&sums)[2 * N][2], bool second, int distance) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float other = __shfl_xor_sync(0xffffffffu, second ? sums[n][e] : sums[n + N][e], distance);
            half[n][e] = (second ? sums[n + N][e] : sums[n][e]) + other;
        }
}
// Sums of 16 columns over the 8 rows of the lanes of one quad place, 2 columns to a lane.
__device__ __forceinline__ void store_column_sums(float* to, float (&sums)[8][2], const Role& at) {
    const bool upper = at.lane & 16, middle = at.lane & 8, lower = at.lane & 4;
    float four[4][2], two[2][2], one[1][2];
    halve_sums(four, sums, upper, 16);
    halve_sums(two, four, middle, 8);
    halve_sums(one, two, lower, 4);
    const int n = 4 * upper + 2 * middle + lower;
    *(float2*)(to + 8 * n + 2 * at.quad) = make_float2(one[0][0], one[0][1]);
}

// From the product do U^T or Y U^T to the left operand `left`, with the weights of the columns of K', and to a tile in shared
// memory, with those of the rows of Q' or beta K'. `factor` is what the product has to be multiplied by, `sum_weight` what M takes
// of each row. By all four warps of a role.
__device__ __forceinline__ void weigh_square(Square& square, Left (&left)[4], float factor, const float (&row_weight)[2],
                                             const float (&sum_weight)[2], Shared& s, const Item& item, const LeftPlace& place,
                                             const Role& at) {
    const int stage = item.stage();
    const float* weight = s.coefficients[stage];
    RoleSums& sums = s.sums[stage];
    float row_sums[2] = {}, column_sums[8][2], of_columns = 0.0f, of_rows[2] = {};
    const float own[2] = {weight[LOG_DECAY * CHUNK + at.rows[0]], weight[LOG_DECAY * CHUNK + at.rows[1]]};
    const float own_rest[2] = {weight[LOG_DECAY_2 * CHUNK + at.rows[0]], weight[LOG_DECAY_2 * CHUNK + at.rows[1]]};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        column_sums[n][0] = column_sums[n][1] = 0.0f;
        if (n / 2 > at.warp) {
#pragma unroll
            for (int e = 0; e < 4; ++e) square.d[n][e] = 0.0f;
            continue;
        }
        const u32 first_j = 8 * n + 2 * at.quad;
        const float2 other = *(const float2*)(weight + LOG_DECAY * CHUNK + first_j);
        const float2 other_rest = *(const float2*)(weight + LOG_DECAY_2 * CHUNK + first_j);
        const float2 key = *(const float2*)(weight + KEY * CHUNK + first_j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int half = e / 2;
            const u32 i = at.rows[half], j = first_j + e % 2;
            const float between = (own[half] - (e % 2 ? other.y : other.x)) + (own_rest[half] - (e % 2 ? other_rest.y : other_rest.x));
            const float decay = i >= j + at.role ? exponential(between) : 0.0f;
            float& d = square.d[n][e];
            d *= factor;
            const float value = from_operand((operand)(square.value[n][half] >> (16 * (e % 2))));
            const float with = i > j ? d * value : 0.0f;
            row_sums[half] += with;
            column_sums[n][e % 2] = fmaf(with, sum_weight[half], column_sums[n][e % 2]);
            d = decay != 0.0f ? d * decay : 0.0f;
            of_columns = fmaxf(of_columns, fabsf(d * (e % 2 ? key.y : key.x)));
            of_rows[half] = fmaxf(of_rows[half], fabsf(d));
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float row = quad_sum(row_sums[half]);
        // All lanes of a quad have the same.
        sums.row_sums[at.role][at.rows[half]] = row * sum_weight[half];
        if (at.role == KEYS) sums.overlap_dots[at.rows[half]] = row;
    }
    store_column_sums(sums.column_sums[at.role][at.warp], column_sums, at);

    of_columns = warp_max(of_columns);
    const float of_both = warp_max(fmaxf(of_rows[0] * fabsf(row_weight[0]), of_rows[1] * fabsf(row_weight[1])));
    float(&largest)[2][4] = s.largest[stage][at.role];
    if (at.lane == 0) {
        largest[0][at.warp] = of_columns;
        largest[1][at.warp] = of_both;
    }
    at.sync();
    const float4 columns = *(const float4*)largest[0], rows = *(const float4*)largest[1];
    const Scale column_scale = scale_for(fmaxf(fmaxf(columns.x, columns.y), fmaxf(columns.z, columns.w)));
    const Scale row_scale = scale_for(fmaxf(fmaxf(rows.x, rows.y), fmaxf(rows.z, rows.w)));
    square.inverse = column_scale.inverse;
    if (at.role == QUERIES && item.turn > 0) barrier_wait(&s.scores_free, item.turn - 1 & 1);
    if (threadIdx.x % 128 == 0) s.square_inverse[at.role] = row_scale.inverse;
    const u32 to = shared_address(s.squares + at.role);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        Left turned;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const float2 key = *(const float2*)(weight + KEY * CHUNK + 16 * c + 8 * m + 2 * at.quad);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float first = square.d[2 * c + m][2 * half], second = square.d[2 * c + m][2 * half + 1];
                left[c].r[2 * m + half] = pack_16(first * key.x * column_scale.factor, second * key.y * column_scale.factor);
                turned.r[2 * m + half] =
                    pack_16(first * row_weight[half] * row_scale.factor, second * row_weight[half] * row_scale.factor);
            }
        }
        store_matrices(to + place(c), turned.r);
    }
    if (at.role == QUERIES) warp_arrive(&s.scores_ready, at.lane);
}

// The transpose of a square in shared memory as a left operand.
__device__ __forceinline__ void load_turned(Left (&left)[4], const Tile& from, u32 turned) {
#pragma unroll
    for (int c = 0; c < 4; ++c) load_matrices_transposed(left[c].r, shared_address(&from) + turned + 16 * c * SPAN_BYTES);
}

// The gradient of q or k: through the normalisation, x / |x|: (d - x^ (x^ . d)) / |x|, where x^ = unit times a row of `tiles`.
__device__ __forceinline__ void store_gradient(INPUT* to, const OwnState& total, u32 tiles, const float (&weight)[2],
                                               const float (&unit)[2], bool normalised, int pitch, u32 valid,
                                               const LeftPlace& place, const Role& at) {
    float back[2] = {};
    if (normalised) {
        float dots[2];
        row_dots(total, tiles, place, dots);
#pragma unroll
        for (int half = 0; half < 2; ++half) back[half] = weight[half] * unit[half] * unit[half] * dots[half];
    }
#pragma unroll
    for (int c = 0; c < KD / 16; ++c) {
        u32 pairs[4];
        load_matrices(pairs, tiles + c / 4 * TILE_BYTES + place(c % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i % 2;
            const float(&of)[4] = total[2 * c + i / 2];
            const float x = from_operand((operand)pairs[i]), y = from_operand((operand)(pairs[i] >> 16));
            const u32 both = pair_of_inputs(of[2 * half] * weight[half] - x * back[half], of[2 * half + 1] * weight[half] - y * back[half]);
            if (at.rows[half] < valid) *(u32*)(to + (long long)at.rows[half] * pitch + 16 * c + 8 * (i / 2) + 2 * at.quad) = both;
        }
    }
}

// By one thread: starts the copies of what an item reads, if there is such an item. Their places must be free.
struct Copies {
    const ChunkGradientParams& params;
    Shared& s;

    __device__ __forceinline__ void rows(const Item& item) const {
        if (!item.there()) return;
        const ChunkParams& p = params.chunk;
        const int stage = item.stage(), row = (int)item.square() * CHUNK;
        Barrier* barrier = s.rows_filled + stage;
        constexpr u32 scale_bytes = 2 * V_TILES * 4;
        barrier_expect(barrier, 3 * V_SPANS * TILE_BYTES + COEFFICIENT_BYTES + TENSORS * scale_bytes);
        copy_tile(shared_address(s.d_o[stage]), params.d_o, {0, item.head(), p.chunk_token[item.chunk()], 0}, barrier);
        copy_tile(shared_address(s.writes[stage]), params.writes, {0, 0, row, 0}, barrier);
        copy_tile(shared_address(s.adjoints[stage]), params.adjoints, {0, 0, row, 0}, barrier);
        copy_bulk(s.coefficients[stage], p.coefficients + item.square() * COEFFICIENT_NUMBERS, COEFFICIENT_BYTES, barrier);
        const float* from[TENSORS] = {p.d_o_scales, p.write_scales, p.adjoint_scales, p.state_scales, p.d_state_scales};
#pragma unroll
        for (int tensor = 0; tensor < TENSORS; ++tensor)
            copy_bulk(s.scales[stage][tensor], from[tensor] + item.square() * 2 * V_TILES, scale_bytes, barrier);
    }
    __device__ __forceinline__ void tiles(const Item& item) const {
        if (!item.there()) return;
        barrier_expect(&s.tiles_filled, 2 * SPANS * TILE_BYTES);
        copy_tile(shared_address(s.keys), params.keys, {0, 0, item.at * CHUNK, 0}, &s.tiles_filled);
        copy_tile(shared_address(s.queries), params.queries, {0, 0, item.at * CHUNK, 0}, &s.tiles_filled);
    }
    __device__ __forceinline__ void states(Tile (&to)[V_SPANS][SPANS], const TensorMap& from, const Item& item, Barrier* barrier) const {
        if (!item.there()) return;
        barrier_expect(barrier, V_SPANS * SPANS * TILE_BYTES);
#pragma unroll
        for (int v = 0; v < V_SPANS; ++v)
            copy_tile(shared_address(to[v]), from, {0, 0, (int)item.square() * VD + v * SPAN, 0}, barrier);
    }

    // What a warp has to do when it has read something for the last time: the last warp that does starts the copies of what
    // comes next.
    __device__ __forceinline__ void leave_rows(const Item& item, int lane) const {
        __syncwarp();
        if (lane == 0 && is_last<12>(s.rows_left + item.stage())) rows(item.after(TURNS));
        __syncwarp();
    }
    __device__ __forceinline__ void leave_states(const Item& item, int lane) const {
        __syncwarp();
        if (lane == 0 && is_last<12>(&s.states_left)) states(s.states, params.states, item.after(1), &s.states_filled);
        __syncwarp();
    }
    __device__ __forceinline__ void leave_d_states(const Item& item, int lane) const {
        __syncwarp();
        if (lane == 0 && is_last<8>(&s.d_states_left)) states(s.d_states, params.d_states, item.after(1), &s.d_states_filled);
        __syncwarp();
    }
    __device__ __forceinline__ void leave_tiles(const Item& item, int lane) const {
        __syncwarp();
        if (lane == 0 && is_last<8>(&s.tiles_left)) tiles(item.after(1));
        __syncwarp();
    }
};

// dq or dk: the two roles run the same instructions as far as they can, since all of them together must fit into the caches that
// instructions come from.
__device__ __forceinline__ void run_role(const ChunkGradientParams& params, Shared& s) {
    const ChunkParams& p = params.chunk;
    const Copies copies = {params, s};
    const Role at;
    const LeftPlace place(at.warp, at.lane);
    const bool of_keys = at.role == KEYS;
    const u32 turned = turned_place(at.warp, at.lane), queries = shared_address(s.queries), keys = shared_address(s.keys);
    const u32 own_rows = of_keys ? keys : queries;
    OwnState total;
#pragma unroll 1
    for (Item item(p); item.there(); item.next()) {
        const int stage = item.stage();
        const float* weight = s.coefficients[stage];
        const float(&scales)[TENSORS][2 * V_TILES] = s.scales[stage];
        const u32 length = p.chunk_length[item.chunk()], own_tiles = shared_address(of_keys ? s.adjoints[stage] : s.d_o[stage]);
        if (item.first()) clear(total);
        barrier_wait(s.rows_filled + stage, item.stage_parity());
        // do as it is, or Y times its scales.
        const float most_left = largest_scale(scales[of_keys ? ADJOINTS : D_OUTPUT], at.lane);
        const float own_scale = of_keys ? scales[ADJOINTS][2 * (at.lane % V_TILES) + at.warp / 2] : 1.0f;
        const float relative = own_scale * inverse_of(most_left);
        const float most_writes = largest_scale(scales[WRITES], at.lane);
        const float relative_writes = scales[WRITES][2 * (at.lane % V_TILES)] * inverse_of(most_writes);
        float first_weight[2], row_weight[2]; // of rows: s q's power of two, or beta; and that with K's
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 i = at.rows[half];
            first_weight[half] = of_keys ? weight[BETA * CHUNK + i] : weight[QUERY * CHUNK + i] * p.scale_unit;
            row_weight[half] = of_keys ? first_weight[half] * weight[KEY * CHUNK + i] : first_weight[half];
        }
        Square square;
        {
            Left left[V_TILES];
            load_left_rows(left, own_tiles, relative * relative_writes, !of_keys, length, place, at);
            hold(square.d);
            warpgroup_fence();
            start_left_product(square.d, left, shared_address(s.writes[stage]));
            warpgroup_commit();
            load_square(square, (of_keys ? p.overlaps : p.scores) + item.square() * SQUARE_TILE, at);
            warpgroup_wait<0>();
            hold(square.d);
        }
        Left weighted[4];
        weigh_square(square, weighted, of_keys ? -(most_left * most_writes) : most_left * most_writes, row_weight, first_weight, s, item,
                     place, at);

        // do S^T, or Y S^T and then U dS^T.
        OwnState product;
#pragma unroll 1
        for (int which = 0; which < (of_keys ? 2 : 1); ++which) {
            const bool back = which == 1;
            const float most_states = largest_scale(scales[back ? D_STATES : STATES], at.lane);
            const float relative_states = scales[back ? D_STATES : STATES][2 * (at.lane % V_TILES)] * inverse_of(most_states);
            Left left[V_TILES];
            load_left_rows(left, back ? shared_address(s.writes[stage]) : own_tiles, (back ? relative_writes : relative) * relative_states,
                           !of_keys, length, place, at);
            barrier_wait(back ? &s.d_states_filled : &s.states_filled, item.turn & 1);
            hold(product);
            warpgroup_fence();
            start_product_over_v(product, left, shared_address(back ? s.d_states : s.states));
            finish_product(product);
            if (back) copies.leave_d_states(item, at.lane);
            else copies.leave_states(item, at.lane);
            barrier_wait(&s.tiles_filled, item.tile & 1);
            float dots[2], to_total[2];
            row_dots(product, own_rows, place, dots);
            const float scale = (back ? most_writes : most_left) * most_states * (back ? p.scale_unit : 1.0f);
            float* const kept = back ? s.sums[stage].write_dots : of_keys ? s.sums[stage].key_dots : s.sums[stage].query_dots;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 i = at.rows[half];
                const float decay = weight[DECAY * CHUNK + i], write = weight[WRITE * CHUNK + i], key = weight[KEY * CHUNK + i];
                const float unit = back ? write : (of_keys ? key : first_weight[half]) * decay;
                const float after = key != 0.0f ? write / key : 0.0f; // e^{G_C - G_i}
                kept[i] = dots[half] * scale * unit;
                to_total[half] = (back ? after : of_keys ? -first_weight[half] * decay : decay) * scale;
            }
            add_rows(total, product, to_total[0], to_total[1]);
        }

        // (dP E) k; or beta (dL E) k, then (dL E)^T (beta k) and (dP E)^T s q.
        float inverse[2] = {of_keys ? first_weight[0] * square.inverse : square.inverse,
                            of_keys ? first_weight[1] * square.inverse : square.inverse};
#pragma unroll 1
        for (int which = 0; which < (of_keys ? 3 : 1); ++which) {
            if (which > 0) {
                if (which == 1) at.sync(); // all warps have stored their rows
                else barrier_wait(&s.scores_ready, item.turn & 1);
                const int from = which == 1 ? KEYS : QUERIES;
                load_turned(weighted, s.squares[from], turned);
                inverse[0] = inverse[1] = s.square_inverse[from];
                if (which == 2) warp_arrive(&s.scores_free, at.lane);
            }
            hold(product);
            warpgroup_fence();
            start_product_over_tokens(product, weighted, which == 2 ? queries : keys);
            finish_product(product);
            add_rows(total, product, inverse[0], inverse[1]);
        }

        if (item.last()) {
            float to_input[2], unit[2];
            const bool normalised = p.norm_epsilon >= 0.0f;
            const float* norms = p.norms + ((long long)item.at * 2 + at.role) * CHUNK;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 i = at.rows[half];
                to_input[half] = (of_keys ? 1.0f : p.scale) * (normalised ? norms[i] : 1.0f);
                unit[half] = of_keys ? weight[KEY * CHUNK + i] : p.scale != 0.0f ? first_weight[half] / p.scale : 0.0f;
            }
            INPUT* const to = (of_keys ? p.dk : p.dq) + ((long long)p.chunk_token[item.chunk()] * p.qk_heads + item.qk_head()) * KD;
            store_gradient(to, total, own_rows, to_input, unit, normalised, p.qk_heads * KD, length, place, at);
            copies.leave_tiles(item, at.lane);
        }
        warp_arrive(s.sums_ready + stage, at.lane);
        copies.leave_rows(item, at.lane);
    }
}

// Asks for what an item reads besides, if there is such an item, to have it in the L2: two squares and v.
__device__ __forceinline__ void ask_for(const ChunkParams& p, const Item& item, u32 thread) {
    if (!item.there()) return;
    constexpr u32 LINE = 128, SQUARE_BYTES_OF_MEMORY = SQUARE_TILE * OPERAND_BYTES, LINES_OF_ROW = VD * (u32)sizeof(INPUT) / LINE;
    auto ask = [](const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); };
    if (thread * LINE < SQUARE_BYTES_OF_MEMORY) {
        ask((const u8*)(p.scores + item.square() * SQUARE_TILE) + thread * LINE);
        ask((const u8*)(p.overlaps + item.square() * SQUARE_TILE) + thread * LINE);
    }
    const u32 row = thread / LINES_OF_ROW;
    const int chunk = item.chunk();
    if (row < (u32)p.chunk_length[chunk])
        ask((const u8*)(p.v + ((long long)(p.chunk_token[chunk] + (int)row) * p.value_heads + item.head()) * VD) +
            thread % LINES_OF_ROW * LINE);
}
// v . Y of each token. `thread` of the 128 of the role.
__device__ __forceinline__ void sum_values(const ChunkParams& p, Shared& s, const Item& item, u32 thread) {
    constexpr u32 PIECES = VD / 8; // of a row
    const int stage = item.stage();
    const long long first = (long long)p.chunk_token[item.chunk()] * p.value_heads + item.head();
    const u32 length = p.chunk_length[item.chunk()], piece = thread % PIECES;
    constexpr u32 ROWS_OF_PASS = 128 / PIECES;
    const u32 first_row = thread / PIECES;
    auto load = [&](u32 row) {
        if (row >= length) return make_uint4(0, 0, 0, 0);
        return *(const uint4*)(p.v + (first + (long long)row * p.value_heads) * VD + 8 * piece);
    };
    uint4 next = load(first_row);
#pragma unroll 1
    for (u32 row = first_row; row < CHUNK; row += ROWS_OF_PASS) {
        const uint4 v = next;
        next = load(row + ROWS_OF_PASS);
        const uint4 y = *(const uint4*)(s.adjoints[stage][piece / 8].bytes + place_in_tile(row, piece % 8 * 8));
        const u32 values[4] = {v.x, v.y, v.z, v.w}, adjoints[4] = {y.x, y.y, y.z, y.w};
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sum = fmaf(first_of(values[e]), from_operand((operand)adjoints[e]), sum);
            sum = fmaf(second_of(values[e]), from_operand((operand)(adjoints[e] >> 16)), sum);
        }
        sum *= s.scales[stage][ADJOINTS][2 * (piece / 2) + row / (CHUNK / 2)];
#pragma unroll
        for (u32 offset = 1; offset < PIECES; offset <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (piece == 0) s.sums[stage].value_dots[row] = sum;
    }
}
// <dS, S> over the rows of a warp: the diagonals of products of its 16 columns of V with themselves.
__device__ __forceinline__ float sum_states(const Shared& s, int stage, u32 warp, u32 lane) {
    float total = 0.0f;
    const LeftPlace place(warp, lane);
    const u32 row_of_right = 16 * warp + (lane & 7) + (lane >> 4) * 8, column_of_right = ((lane >> 3) & 1) * 8;
#pragma unroll 1
    for (u32 v = 0; v < V_SPANS; ++v) {
        float squares[2][4];
        clear(squares);
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) {
            u32 left[4], right[4];
            load_matrices(left, shared_address(s.states[v] + c / 4) + place(c % 4));
            load_matrices(right, shared_address(s.d_states[v] + c / 4) + place_in_tile(row_of_right, c % 4 * 16 + column_of_right));
            mma_16816(squares[0], left, right[0], right[1]);
            mma_16816(squares[1], left, right[2], right[3]);
        }
        // Elements (row, row) and (row + 8, row + 8) are in the lane whose columns hold `row`.
        const u32 row = lane / 4, tile = 2 * (4 * v + warp);
        const float sum = row % 2 ? squares[0][1] + squares[1][3] : squares[0][0] + squares[1][2];
        if (row / 2 == lane % 4) total = fmaf(sum, s.scales[stage][STATES][tile] * s.scales[stage][D_STATES][tile], total);
    }
    return warp_sum(total);
}
// dg and dbeta, by one warp.
__device__ __forceinline__ void store_gates(const ChunkParams& p, const Shared& s, const Item& item, int lane) {
    const int stage = item.stage(), token = p.chunk_token[item.chunk()], length = p.chunk_length[item.chunk()];
    const float* weight = s.coefficients[stage];
    const RoleSums& sums = s.sums[stage];
    // dg_t: what lies behind t of the first sums, what lies before it of the b_i.
    double behind = 0.0;
#pragma unroll
    for (int w = 0; w < 4; ++w) behind += sums.state_dots[w];
    behind *= weight[DECAY * CHUNK + CHUNK - 1] * p.scale_unit;
    double before[CHUNK / 32], all = 0.0;
#pragma unroll
    for (int part = 0; part < CHUNK / 32; ++part) {
        double sum = sums.write_dots[32 * part + lane];
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            const double other = __shfl_up_sync(0xffffffffu, sum, offset);
            if (lane >= offset) sum += other;
        }
        // Without the own one: the sum up to the lane before.
        const double upto = __shfl_up_sync(0xffffffffu, sum, 1);
        before[part] = all + (lane > 0 ? upto : 0.0);
        all += __shfl_sync(0xffffffffu, sum, 31);
    }
#pragma unroll
    for (int part = CHUNK / 32 - 1; part >= 0; --part) {
        const int i = 32 * part + lane;
        double square = 0.0;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            double column = 0.0;
#pragma unroll
            for (int w = 0; w < 4; ++w) column += sums.column_sums[which][w][i];
            square += sums.row_sums[which][i] - column;
        }
        const float key = sums.key_dots[i];
        double sum = square + (sums.query_dots[i] - (double)weight[BETA * CHUNK + i] * key);
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            const double other = __shfl_down_sync(0xffffffffu, sum, offset);
            if (lane + offset < 32) sum += other;
        }
        sum += behind;
        behind = __shfl_sync(0xffffffffu, sum, 0);
        if (i < length) {
            const long long to = (long long)(token + i) * p.value_heads + item.head();
            p.dg[to] = (float)(sum + before[part]);
            p.dbeta[to] = sums.value_dots[i] - key + sums.overlap_dots[i];
        }
    }
}

__device__ __forceinline__ void run_sums(const ChunkGradientParams& params, Shared& s) {
    const ChunkParams& p = params.chunk;
    const Copies copies = {params, s};
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    {
        const Item first(p);
        if (thread == 0) {
            copies.rows(first);
            copies.states(s.states, params.states, first, &s.states_filled);
            copies.tiles(first);
            copies.states(s.d_states, params.d_states, first, &s.d_states_filled);
            if (first.there()) copies.rows(first.after(1));
        }
        __syncwarp();
        ask_for(p, first, thread);
    }
#pragma unroll 1
    for (Item item(p); item.there(); item.next()) {
        const int stage = item.stage();
        ask_for(p, item.after(1), thread);
        barrier_wait(s.rows_filled + stage, item.stage_parity());
        sum_values(p, s, item, thread);
        barrier_wait(&s.states_filled, item.turn & 1);
        barrier_wait(&s.d_states_filled, item.turn & 1);
        const float with_state = sum_states(s, stage, warp, lane);
        if (lane == 0) s.sums[stage].state_dots[warp] = with_state;
        copies.leave_states(item, lane);
        copies.leave_d_states(item, lane);
        warp_arrive(s.sums_ready + stage, lane);
        if (warp == 0) {
            barrier_wait(s.sums_ready + stage, item.stage_parity());
            store_gates(p, s, item, lane);
        }
        copies.leave_rows(item, lane);
    }
}
#endif

// Grid: as many blocks as there are multiprocessors, or chunks times HK where that is less.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) chunk_gradient(const __grid_constant__ ChunkGradientParams params) {
#if HOPPER
    extern __shared__ __align__(1024) u8 shared[];
    Shared& s = *(Shared*)shared;
    wait_for_kernel_before();
    if (threadIdx.x == 0) {
        for (int i = 0; i < TURNS; ++i) {
            barrier_init(s.rows_filled + i);
            s.rows_left[i] = 0;
            barrier_init(s.sums_ready + i, 12);
        }
        barrier_init(&s.tiles_filled);
        barrier_init(&s.states_filled);
        barrier_init(&s.d_states_filled);
        s.tiles_left = s.states_left = s.d_states_left = 0;
        barrier_init(&s.scores_ready, 4);
        barrier_init(&s.scores_free, 4);
    }
    __syncthreads();
    if (threadIdx.x < 256) {
        take_registers<ROLE_REGISTERS>();
        run_role(params, s);
    } else {
        give_registers<SUMS_REGISTERS>();
        run_sums(params, s);
    }
#endif
}
