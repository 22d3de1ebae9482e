// The gated delta rule, token by token: the ground truth on a GPU. Forward and backward of GDN and GDN-2.
//
// Per value head, with S (K, V) and s the scale; GDN has e = k and one g and one beta per token and head:
//
//   S' = Diag(e^g) S_{t-1}
//   GDN     e = k      r = v - S'^T e      u = beta r          GDN-2   e = b*k    r = w*v - S'^T e    u = r
//   S_t = S' + k u^T                       o_t = s S_t^T q
//
// The adjoint, with D the gradient of S_t after all later tokens:
//
//   D += s q do^T     dq = s S_t do       du = D^T k
//   GDN     x = beta du                   GDN-2   x = du
//   D' = D - e x^T    de = -S' x          dg = sum_v S'*D'     gradient of S_{t-1} = Diag(e^g) D'
//   GDN     dk = D u + de        dbeta = du . r     dv = x
//   GDN-2   dk = D u + b*de      db = k*de          dv = w*x   dw = v*x
//
// Work is split so that the columns of S, which never mix, are independent: a warp owns COLUMNS of them, the lane of a
// warp the rows lane, lane + 32, ...; only S'^T e, S_t^T q and D^T k are sums over a warp. What is summed over columns
// (dq, dk and the gradients of the gates) is summed in a fixed order: in a lane, over the warps of a block, over the
// blocks of a head, over the value heads of a group. So two runs agree to the bit, and a sequence gives the same bits
// whatever it is packed with.
//
// The backward needs S' of every token. The forward keeps a state every SEGMENT tokens; a segment's states are computed
// again from there and lie in global memory (they mostly stay in the second-level cache) until the adjoint has used them.
//
// Compile-time constants:
//   STATE          double or float: the type of every array and of all arithmetic
//   CHANNEL_GATES  0 GDN, 1 GDN-2
//   ROWS           ceil(K / 32): rows of S in a lane
//   COLUMNS        columns of S in a warp: 1, 2 or 4
//   SEGMENT        tokens between two kept states
//   WARPS          most warps in a block; the launch has as many as V needs
#include "recurrent.cuh"

// Vectors of K numbers per token that are summed over warps: dq, dk, and for GDN-2 db and dg.
constexpr int VECTORS = CHANNEL_GATES ? 4 : 2;
// Tokens between fetching an input into the second-level cache and loading it.
constexpr int FETCH_AHEAD = 8;

struct Forward {
    Problem problem;
    const STATE* initial_state;  // (N, HV, K, V), or null for zeros
    STATE* o;                    // (tokens, HV, V)
    STATE* final_state;          // (N, HV, K, V)
    STATE* kept;                 // null, or states for the backward: (slots, heads, column groups, PART)
};

struct Backward {
    Problem problem;
    const STATE* d_o;            // (tokens, HV, V)
    const STATE* d_final_state;  // (N, HV, K, V), or null for zeros
    const STATE* kept;           // (slots, heads, column groups, PART)
    STATE* states;               // scratch: (sequences, heads, column groups, SEGMENT, PART)
    STATE* vectors;              // scratch: (sequences, heads, column groups, VECTORS, SEGMENT, ROWS * 32)
    STATE* dq;                   // sums over a block of columns: (column blocks, tokens, heads, K)
    STATE* dk;                   // likewise
    STATE* dg;                   // (column blocks, tokens, heads), GDN-2: (column blocks, tokens, heads, K)
    STATE* d_erase;              // dbeta or db, likewise
    STATE* dv;                   // (tokens, HV, V)
    STATE* dw;                   // GDN-2: (tokens, HV, V)
    STATE* dh0;                  // (N, HV, K, V)
    i64 batch_tokens;            // tokens of this launch's sequences together
};

// out (tokens, out_heads, width) = sum over column blocks and over the `group` heads that share an output head.
struct Reduce {
    const STATE* partial;        // (column blocks, batch tokens, heads, width)
    STATE* out;
    i64 first_token, batch_tokens;
    int first_head, heads, column_blocks, width, out_heads, group;
};

extern "C" __global__ void __launch_bounds__(WARPS* LANES, 1) recurrent_forward(const __grid_constant__ Forward f) {
    const Problem& p = f.problem;
    const Place place(p);
    if (!place.active()) return;
    const STATE scale = (STATE)p.scale;
    State state;
    state.load(f.initial_state, p, place);
    Token next;
    if (place.tokens > 0) {
        next.load(p, place, nullptr, 0);
        next.prepare();
    }
    for (i64 t = 0; t < place.tokens; t++) {
        if (f.kept && t % SEGMENT == 0) state.store_part(f.kept + place.kept(p.heads, t), place.lane);
        const Token now = next;
        if (t + FETCH_AHEAD < place.tokens) {
            i64 token = place.token + t + FETCH_AHEAD;
            fetch(p.q + (token * p.qk_heads + place.qk_head) * p.key_dim, p.key_dim, place.lane);
            fetch(p.k + (token * p.qk_heads + place.qk_head) * p.key_dim, p.key_dim, place.lane);
            fetch(p.v + (token * p.value_heads + place.head) * p.value_dim, p.value_dim, place.lane);
        }
        if (t + 1 < place.tokens) next.load(p, place, nullptr, t + 1);

        STATE residual[COLUMNS], u[COLUMNS], o[COLUMNS], query[ROWS];
        now.erase_from(state, residual, place.lane);
        now.strengthen(residual, u);
        state.add(now.k, u);
#pragma unroll
        for (int r = 0; r < ROWS; r++) query[r] = scale * now.q[r];
        state.transposed_times(query, o);
        STATE sum = sum_to_lanes(o, place.lane);
        int column = place.column + place.lane / (LANES / COLUMNS);
        if (place.lane % (LANES / COLUMNS) == 0 && column < p.value_dim)
            f.o[((place.token + t) * p.value_heads + place.head) * p.value_dim + column] = sum;
        next.prepare();
    }
    state.store(f.final_state, p, place);
}

// A segment's sums over the columns of a block, from those of its warps.
struct BlockSums {
    STATE dg[WARPS][SEGMENT], d_beta[WARPS][SEGMENT];  // GDN
};

// Adds up over the block's warps what each wrote of a segment, (VECTORS, SEGMENT, ROWS * 32), and writes the sums.
__device__ __forceinline__ void add_up_vectors(const Backward& b, const Place& place, i64 first, int count) {
    const Problem& p = b.problem;
    STATE* const out[4] = {b.dq, b.dk, b.d_erase, b.dg};
    int warps = min(place.warps, place.groups - place.block * place.warps);
    const STATE* parts = b.vectors + (place.scratch(p.heads) - place.warp) * (VECTORS * SEGMENT * ROWS * LANES);
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++) {
        for (int i = threadIdx.x; i < count * p.key_dim; i += blockDim.x) {
            int t = i / p.key_dim, row = i % p.key_dim;
            STATE sum = 0;
            for (int warp = 0; warp < warps; warp++)
                sum += parts[((i64)(warp * VECTORS + vector) * SEGMENT + t) * (ROWS * LANES) + row];
            i64 token = place.block * b.batch_tokens + place.batch_token + first + t;
            out[vector][(token * p.heads + place.batch_head) * p.key_dim + row] = sum;
        }
    }
}

// The same for the two scalars of GDN.
__device__ __forceinline__ void add_up_scalars(
    const Backward& b, const Place& place, const BlockSums& sums, i64 first, int count) {
    int warps = min(place.warps, place.groups - place.block * place.warps);
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
        STATE dg = 0, d_beta = 0;
        for (int warp = 0; warp < warps; warp++) {
            dg += sums.dg[warp][t];
            d_beta += sums.d_beta[warp][t];
        }
        i64 token = place.block * b.batch_tokens + place.batch_token + first + t;
        b.dg[token * b.problem.heads + place.batch_head] = dg;
        b.d_erase[token * b.problem.heads + place.batch_head] = d_beta;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* LANES, 1) recurrent_backward(const __grid_constant__ Backward b) {
    __shared__ STATE residuals[WARPS][SEGMENT][COLUMNS];
    __shared__ BlockSums sums;
    const Problem& p = b.problem;
    const Place place(p);
    const STATE scale = (STATE)p.scale;
    const int lane = place.lane;
    STATE* const states = b.states + place.scratch(p.heads) * SEGMENT * PART;
    STATE* const vectors = b.vectors + place.scratch(p.heads) * (VECTORS * SEGMENT * ROWS * LANES);
    auto keep = [&](int vector, int t, const STATE(&x)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) vectors[(vector * SEGMENT + t) * (ROWS * LANES) + r * LANES + lane] = x[r];
    };

    State adjoint;
    adjoint.load(b.d_final_state, p, place);
    for (i64 first = (place.tokens - 1) / SEGMENT * SEGMENT; first >= 0 && place.tokens > 0; first -= SEGMENT) {
        const int count = (int)min((i64)SEGMENT, place.tokens - first);
        if (place.active()) {
            State state;
            state.load_part(b.kept + place.kept(p.heads, first), lane);
            Token next;
            next.load(p, place, b.d_o, first);
            next.prepare();
            for (int t = 0; t < count; t++) {
                const Token now = next;
                if (t + 1 < count) next.load(p, place, b.d_o, first + t + 1);
                STATE residual[COLUMNS], u[COLUMNS], dq[ROWS];
                now.erase_from(state, residual, lane);
                state.store_part(states + (i64)t * PART, lane);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    if (lane == c) residuals[place.warp][t][c] = residual[c];
                now.strengthen(residual, u);
                state.add(now.k, u);
                state.times(now.d_o, dq);
#pragma unroll
                for (int r = 0; r < ROWS; r++) dq[r] *= scale;
                keep(0, t, dq);
                next.prepare();
            }
            __syncwarp();

            for (int t = count - 1; t >= 0; t--) {
                Token now;
                now.load(p, place, b.d_o, first + t);
                state.load_part(states + (i64)t * PART, lane);
                if (t > 0) fetch_part(states + (i64)(t - 1) * PART, lane);
                now.prepare();
                STATE query[ROWS], e[ROWS], residual[COLUMNS], u[COLUMNS], du[COLUMNS], x[COLUMNS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) query[r] = scale * now.q[r];
                adjoint.add(query, now.d_o);
                adjoint.transposed_times(now.k, du);
                sum_to_all(du, lane);
                now.strengthen(du, x);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) residual[c] = residuals[place.warp][t][c];
                now.strengthen(residual, u);
                now.erased(e);

                STATE dk[ROWS], de[ROWS], dg[ROWS], minus_x[COLUMNS];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) minus_x[c] = -x[c];
                adjoint.times(u, dk);
                state.times(minus_x, de);
                adjoint.add(e, minus_x);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    dg[r] = 0;
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) dg[r] += state.at[r][c] * adjoint.at[r][c];
                    dk[r] += CHANNEL_GATES ? now.erase[CHANNEL_GATES ? r : 0] * de[r] : de[r];
                    de[r] *= now.k[r];
                }
                adjoint.decay(now.decay);

                i64 value_row = ((place.token + first + t) * p.value_heads + place.head) * p.value_dim;
                keep(1, t, dk);
                if constexpr (CHANNEL_GATES) {
                    keep(2, t, de);
                    keep(3, t, dg);
                    STATE dv[COLUMNS], dw[COLUMNS];
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        dv[c] = now.write[CHANNEL_GATES ? c : 0] * x[c];
                        dw[c] = now.v[c] * x[c];
                    }
                    store_columns(b.dv + value_row, dv, p, place);
                    store_columns(b.dw + value_row, dw, p, place);
                } else {
                    STATE d_beta = 0, dg_sum = 0;
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) d_beta += du[c] * residual[c];
#pragma unroll
                    for (int r = 0; r < ROWS; r++) dg_sum += dg[r];
                    dg_sum = warp_sum(dg_sum);
                    if (lane == 0) sums.dg[place.warp][t] = dg_sum;
                    if (lane == 0) sums.d_beta[place.warp][t] = d_beta;
                    store_columns(b.dv + value_row, x, p, place);
                }
            }
        }
        __syncthreads();
        add_up_vectors(b, place, first, count);
        if constexpr (!CHANNEL_GATES) add_up_scalars(b, place, sums, first, count);
        __syncthreads();
    }
    if (place.active()) adjoint.store(b.dh0, p, place);
}

// Goes on from what an earlier launch left in `out` where that had the first heads of a group, so that the order of
// the sum does not depend on how heads were split into launches.
extern "C" __global__ void __launch_bounds__(256) recurrent_reduce(const __grid_constant__ Reduce f) {
    int first_out = f.first_head / f.group;
    int outs = (f.first_head + f.heads - 1) / f.group - first_out + 1;
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= f.batch_tokens * outs * f.width) return;
    int i = (int)(at % f.width), out_head = first_out + (int)(at / f.width % outs);
    i64 token = at / f.width / outs;
    STATE* out = f.out + ((f.first_token + token) * f.out_heads + out_head) * f.width + i;
    int first = max(out_head * f.group, f.first_head), end = min((out_head + 1) * f.group, f.first_head + f.heads);
    STATE sum = first == out_head * f.group ? STATE(0) : *out;
    for (int head = first; head < end; head++)
        for (int block = 0; block < f.column_blocks; block++)
            sum += f.partial[((block * f.batch_tokens + token) * f.heads + head - f.first_head) * f.width + i];
    *out = sum;
}
