// What comes through the segments of a sequence that is cut, exactly: with M_m what a state is multiplied by over segment m,
//
//   S at the start of m + 1 = (what m makes of a zero state) + M_m (S at the start of m)             chunk_join_states
//   dS at the end of m - 1 = (what m's own outputs send back) + M_m^T (dS at the end of m)           chunk_join_d_states
//
// Both in place, binary32 in every mode. A block takes a few columns of V of a head and goes from segment to segment; its warps
// share the contracted index, in a fixed order.
#include "chunk.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int COLUMNS = KD > 128 ? 4 : 8; // of V
constexpr int LANE_K = KD / 32;  // elements of a row of a lane
constexpr int PART = KD / WARPS; // of the contracted index

// next (V, K) += states (V, K) times matrix (K, K).
__device__ __forceinline__ void add_product(float* next, const float (*states)[KD], const float* matrix,
                                            float (*sums)[COLUMNS][KD]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    float sum[COLUMNS][LANE_K] = {};
#pragma unroll(KD > 128 ? 2 : 8)
    for (int j = warp * PART; j < (warp + 1) * PART; ++j) {
        float row[LANE_K];
#pragma unroll
        for (int i = 0; i < LANE_K; ++i) row[i] = matrix[j * KD + 32 * i + lane];
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v) {
            const float x = states[v][j];
            if (x == 0.0f) continue; // zero times an infinite growth stays zero
#pragma unroll
            for (int i = 0; i < LANE_K; ++i) sum[v][i] = fmaf(x, row[i], sum[v][i]);
        }
    }
#pragma unroll
    for (int v = 0; v < COLUMNS; ++v)
#pragma unroll
        for (int i = 0; i < LANE_K; ++i) sums[warp][v][32 * i + lane] = sum[v][i];
    __syncthreads();
    for (int at = threadIdx.x; at < COLUMNS * KD; at += THREADS) {
        float total = next[at];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += sums[w][at / KD][at % KD];
        next[at] = total;
    }
    __syncthreads();
}

template <bool Backward> __device__ __forceinline__ void join(const ChunkParams& p, float* states) {
    let_next_kernel_start();
    wait_for_kernel_before();
    __shared__ float current[COLUMNS][KD];
    __shared__ float sums[WARPS][COLUMNS][KD];
    const int head = blockIdx.y, first = p.sequence_segment[blockIdx.z], last = p.sequence_segment[blockIdx.z + 1] - 1;
    const int step = Backward ? -1 : 1;
    for (int m = Backward ? last - 1 : first + 1; first < m && m < last; m += step) {
        const long long segment = (long long)m * p.value_heads + head;
        const float* from = states + (segment * VD + blockIdx.x * COLUMNS) * KD;
        for (int at = threadIdx.x; at < COLUMNS * KD; at += THREADS) current[at / KD][at % KD] = from[at];
        __syncthreads();
        add_product(states + ((segment + step * p.value_heads) * VD + blockIdx.x * COLUMNS) * KD, current,
                    p.transitions + (2 * segment + Backward) * KD * KD, sums);
    }
}

// Grid: V / COLUMNS, HV, N.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_join_states(const __grid_constant__ ChunkParams p) {
    join<false>(p, p.segment_states);
}

extern "C" __global__ void __launch_bounds__(THREADS) chunk_join_d_states(const __grid_constant__ ChunkParams p) {
    join<true>(p, p.segment_d_states);
}
