// Serving: one to MAX_TOKENS tokens of every sequence from its state, which is updated in place.
//
// Per sequence and value head, with S (K, V), for one token after the other:
//
//   S' = e^g S     u = beta (v - S'^T k)     o = s (S'^T q + (q . k) u)     S = S' + k u^T
//
// The output is that of the recurrence, o = s S^T q, rearranged so that both products need S' alone and are summed
// over K together. What takes the time is moving the state: it is read once, stays in registers for all tokens, and is
// written once, in accesses of 16 bytes that a block issues before anything else. The columns of S are independent, so
// a head is cut into blocks of columns.
//
// Compile-time constants:
//   KEY_DIM, VALUE_DIM  K and V, multiples of 32
//   STATE               float or bf16: how a state is stored; all arithmetic is binary32
//   INPUT               float, bf16 or f16: q, k, v and o
//   GATE                float, bf16 or f16: g and beta, or a and b
//   KEY_MINOR           0: a state is (K, V); 1: it is (V, K)
//   RAW_GATES           1: g = -exp(A_log) softplus(a + dt_bias), beta = beta_scale sigmoid(b)
//   L2_NORM             1: q and k are divided by sqrt(sum of squares + norm_eps)
//   WARPS               warps of a block
//   LANES               lanes of a warp along the contiguous axis of the state: 4, 8, 16 or 32
//   SLOTS               KEY_MINOR: columns of a lane
#include "common.cuh"

typedef long long i64;

constexpr int MAX_TOKENS = 8;
constexpr int PER_ACCESS = 16 / (int)sizeof(STATE);
constexpr int OTHER_LANES = 32 / LANES;
// Columns of S in a block, and the numbers of the state in a thread: AT accesses of PER_ACCESS.
#if KEY_MINOR
constexpr int COLUMNS = SLOTS * WARPS * OTHER_LANES;
constexpr int PIECES = KEY_DIM / (LANES * PER_ACCESS);
constexpr int AT = SLOTS * PIECES;
static_assert(KEY_DIM % (LANES * PER_ACCESS) == 0, "whole accesses along K");
#else
constexpr int COLUMNS = LANES * PER_ACCESS;
constexpr int AT = KEY_DIM / (WARPS * OTHER_LANES);
static_assert(KEY_DIM % (WARPS * OTHER_LANES) == 0, "rows divide among the threads");
#endif
constexpr int COLUMN_BLOCKS = VALUE_DIM / COLUMNS;
static_assert(VALUE_DIM % COLUMNS == 0, "columns divide among the blocks");
static_assert(KEY_DIM % 32 == 0, "whole warps along K");

struct Decode {
    const INPUT* q;          // (B, T, HK, K)
    const INPUT* k;          // (B, T, HK, K)
    const INPUT* v;          // (B, T, HV, V)
    const GATE* g;           // (B, T, HV); RAW_GATES: a
    const GATE* beta;        // (B, T, HV); RAW_GATES: b
    const float* a_log;      // (HV), RAW_GATES
    const float* dt_bias;    // (HV), RAW_GATES
    STATE* states;           // (slots, HV, K, V) or (slots, HV, V, K)
    const int* slots;        // (B): where the state of each sequence lies, none of [0, slot_count) to skip it; null for 0, 1, ...
    INPUT* o;                // (B, T, HV, V); zeros for a sequence that is skipped
    i64 slot_stride;         // numbers from one slot to the next
    int tokens, qk_heads, value_heads, slot_count;
    float scale, beta_scale, norm_eps;
};

// What every thread of a block needs of the tokens.
struct Tokens {
    float q[MAX_TOKENS][KEY_DIM], k[MAX_TOKENS][KEY_DIM], v[MAX_TOKENS][COLUMNS];  // q times the scale
    float qk[MAX_TOKENS], decay[MAX_TOKENS], beta[MAX_TOKENS];
};

// 16 bytes of a state, which pass through the first-level cache without staying: nobody reads them again.
__device__ __forceinline__ uint4 load_16(const STATE* from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_16(STATE* to, uint4 x) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ void unpack(uint4 packed, float (&x)[4]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __uint_as_float(words[i]);
}

// Two bf16 in a word, the first in the low half.
__device__ __forceinline__ void unpack(uint4 packed, float (&x)[8]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}

__device__ __forceinline__ uint4 pack(const float (&x)[4]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = from_float<bf16>(x[2 * i]).bits | (u32)from_float<bf16>(x[2 * i + 1]).bits << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// softplus and sigmoid without overflow
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Loads, normalises and gates the block's tokens, a warp each.
__device__ __forceinline__ void prepare(const Decode& d, Tokens& tokens, int sequence, int head, int first_column) {
    constexpr int PER_LANE = KEY_DIM / 32;
    const int lane = threadIdx.x % 32;
    const i64 first = (i64)sequence * d.tokens;
    for (int i = threadIdx.x; i < d.tokens * COLUMNS; i += WARPS * 32) {
        i64 row = (first + i / COLUMNS) * d.value_heads + head;
        tokens.v[i / COLUMNS][i % COLUMNS] = to_float(d.v[row * VALUE_DIM + first_column + i % COLUMNS]);
    }
    for (int t = threadIdx.x / 32; t < d.tokens; t += WARPS) {
        const i64 qk_row = ((first + t) * d.qk_heads + head / (d.value_heads / d.qk_heads)) * KEY_DIM;
        const i64 row = (first + t) * d.value_heads + head;
        float q[PER_LANE], k[PER_LANE], qq = 0, kk = 0, qk = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            q[i] = to_float(d.q[qk_row + lane + 32 * i]);
            k[i] = to_float(d.k[qk_row + lane + 32 * i]);
        }
        float g = to_float(d.g[row]), beta = to_float(d.beta[row]);
        float q_factor = d.scale, k_factor = 1;
        if (L2_NORM) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                qq += q[i] * q[i];
                kk += k[i] * k[i];
            }
            q_factor *= 1.0f / sqrtf(warp_sum(qq) + d.norm_eps);
            k_factor *= 1.0f / sqrtf(warp_sum(kk) + d.norm_eps);
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            tokens.q[t][lane + 32 * i] = q[i] *= q_factor;
            tokens.k[t][lane + 32 * i] = k[i] *= k_factor;
            qk += q[i] * k[i];
        }
        qk = warp_sum(qk);
        if (RAW_GATES) {
            g = -expf(d.a_log[head]) * softplus(g + d.dt_bias[head]);
            beta = d.beta_scale * sigmoid(beta);
        }
        if (lane == 0) {
            tokens.qk[t] = qk;
            tokens.decay[t] = expf(g);
            tokens.beta[t] = beta;
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(const __grid_constant__ Decode d) {
    __shared__ Tokens tokens;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_column = blockIdx.x % COLUMN_BLOCKS * COLUMNS;
    const int head = blockIdx.x / COLUMN_BLOCKS % d.value_heads;
    const int sequence = blockIdx.x / COLUMN_BLOCKS / d.value_heads;
    INPUT* const o = d.o + ((i64)sequence * d.tokens * d.value_heads + head) * VALUE_DIM + first_column;
    const int o_stride = d.value_heads * VALUE_DIM;
    const int slot = d.slots ? d.slots[sequence] : sequence;
    if (slot < 0 || slot >= d.slot_count) {
        for (int i = threadIdx.x; i < d.tokens * COLUMNS; i += WARPS * 32)
            o[i / COLUMNS * o_stride + i % COLUMNS] = from_float<INPUT>(0.0f);
        return;
    }
    STATE* const state = d.states + slot * d.slot_stride + (i64)head * (KEY_DIM * VALUE_DIM);
    const int along = lane % LANES, across = lane / LANES;
    STATE* at[AT];
    uint4 packed[AT];
#pragma unroll
    for (int i = 0; i < AT; i++) {
#if KEY_MINOR
        int column = first_column + (i / PIECES * WARPS + warp) * OTHER_LANES + across;
        at[i] = state + column * KEY_DIM + (i % PIECES * LANES + along) * PER_ACCESS;
#else
        int row = (i * WARPS + warp) * OTHER_LANES + across;
        at[i] = state + row * VALUE_DIM + first_column + along * PER_ACCESS;
#endif
        packed[i] = load_16(at[i]);
    }
    prepare(d, tokens, sequence, head, first_column);
    __syncthreads();

    float s[AT][PER_ACCESS];
#pragma unroll
    for (int i = 0; i < AT; i++) unpack(packed[i], s[i]);

#if KEY_MINOR
    // A column lies in LANES lanes of one warp, which add up S'^T k and S'^T q among themselves.
    for (int t = 0; t < d.tokens; t++) {
        const float decay = tokens.decay[t], beta = tokens.beta[t], qk = tokens.qk[t];
        float erased[SLOTS] = {}, read[SLOTS] = {};
#pragma unroll
        for (int i = 0; i < AT; i++) {
            int key = (i % PIECES * LANES + along) * PER_ACCESS;
#pragma unroll
            for (int j = 0; j < PER_ACCESS; j++) {
                s[i][j] *= decay;
                erased[i / PIECES] += s[i][j] * tokens.k[t][key + j];
                read[i / PIECES] += s[i][j] * tokens.q[t][key + j];
            }
        }
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            int column = (slot * WARPS + warp) * OTHER_LANES + across;
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) {
                erased[slot] += __shfl_xor_sync(0xffffffffu, erased[slot], offset);
                read[slot] += __shfl_xor_sync(0xffffffffu, read[slot], offset);
            }
            float u = beta * (tokens.v[t][column] - erased[slot]);
            if (along == 0) o[t * o_stride + column] = from_float<INPUT>(read[slot] + qk * u);
#pragma unroll
            for (int i = slot * PIECES; i < (slot + 1) * PIECES; i++)
#pragma unroll
                for (int j = 0; j < PER_ACCESS; j++)
                    s[i][j] += u * tokens.k[t][(i % PIECES * LANES + along) * PER_ACCESS + j];
        }
    }
#else
    // The rows of a column lie in OTHER_LANES lanes of every warp. Two buffers for the warps' sums, so that one barrier
    // a token suffices.
    __shared__ float sums[2][WARPS][2][COLUMNS];
    for (int t = 0; t < d.tokens; t++) {
        const float decay = tokens.decay[t], beta = tokens.beta[t], qk = tokens.qk[t];
        float erased[PER_ACCESS] = {}, read[PER_ACCESS] = {}, u[PER_ACCESS];
#pragma unroll
        for (int i = 0; i < AT; i++) {
            int row = (i * WARPS + warp) * OTHER_LANES + across;
#pragma unroll
            for (int j = 0; j < PER_ACCESS; j++) {
                s[i][j] *= decay;
                erased[j] += s[i][j] * tokens.k[t][row];
                read[j] += s[i][j] * tokens.q[t][row];
            }
        }
#pragma unroll
        for (int j = 0; j < PER_ACCESS; j++) {
#pragma unroll
            for (int offset = LANES; offset < 32; offset *= 2) {
                erased[j] += __shfl_xor_sync(0xffffffffu, erased[j], offset);
                read[j] += __shfl_xor_sync(0xffffffffu, read[j], offset);
            }
            if (across == 0) {
                sums[t % 2][warp][0][along * PER_ACCESS + j] = erased[j];
                sums[t % 2][warp][1][along * PER_ACCESS + j] = read[j];
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PER_ACCESS; j++) {
            int column = along * PER_ACCESS + j;
            erased[j] = read[j] = 0;
#pragma unroll
            for (int other = 0; other < WARPS; other++) {
                erased[j] += sums[t % 2][other][0][column];
                read[j] += sums[t % 2][other][1][column];
            }
            u[j] = beta * (tokens.v[t][column] - erased[j]);
            if (warp == 0 && across == 0) o[t * o_stride + column] = from_float<INPUT>(read[j] + qk * u[j]);
        }
#pragma unroll
        for (int i = 0; i < AT; i++)
#pragma unroll
            for (int j = 0; j < PER_ACCESS; j++)
                s[i][j] += tokens.k[t][(i * WARPS + warp) * OTHER_LANES + across] * u[j];
    }
#endif

#pragma unroll
    for (int i = 0; i < AT; i++) store_16(at[i], pack(s[i]));
}
