// What comes through the segments of a sequence that is cut, exactly: with M_m what a state is multiplied by over segment m,
//
//   S at the start of m + 1 = (what m makes of a zero state) + M_m (S at the start of m)             chunk_join_states
//   dS at the end of m - 1 = (what m's own outputs send back) + M_m^T (dS at the end of m)           chunk_join_d_states
//
// Both in place, binary32 in every mode. A block takes a few columns of V of a head and goes from segment to segment. The contracted
// index is summed in WARPS parts, which are added one after the other.
#include "chunk.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int COLUMNS = KD > 128 ? 4 : 8; // of V
constexpr int LANE_K = KD / 32;  // elements of a row of a lane
constexpr int PART = KD / WARPS; // of the contracted index
constexpr int OWN = COLUMNS * KD / THREADS; // elements of a state of a thread
// Rows of a matrix that a warp loads at once: all of its own where the registers hold those of two matrices.
constexpr int AT_ONCE = KD > 128 ? 2 : PART;

// Rows of a matrix (K, K), from `first` on.
typedef float Rows[AT_ONCE][LANE_K];
__device__ __forceinline__ void load_rows(Rows& rows, const float* matrix, int first) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int i = 0; i < LANE_K; ++i) rows[j][i] = matrix[(first + j) * KD + 32 * i + lane];
}

// sum (V, K) += states (V, K) times those rows.
__device__ __forceinline__ void add_rows(float (&sum)[COLUMNS][LANE_K], const float (*states)[KD], const Rows& rows, int first) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v) {
            const float x = states[v][first + j];
            if (x == 0.0f) continue; // zero times an infinite growth stays zero
#pragma unroll
            for (int i = 0; i < LANE_K; ++i) sum[v][i] = fmaf(x, rows[j][i], sum[v][i]);
        }
}

struct Shared {
    float current[COLUMNS][KD];
    float sums[WARPS][COLUMNS][KD];
};

// One step: `next` in memory and s.current become `next` + s.current times the matrix, whose first rows are in `rows`. What the step
// after it reads first, `after`, is asked for before, so that it is there when it is wanted.
__device__ __forceinline__ void step_on(Shared& s, float* next, const float* matrix, const Rows& rows, Rows& rows_after,
                                        const float* after) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, first = warp * PART;
    float total[OWN], sum[COLUMNS][LANE_K] = {};
#pragma unroll
    for (int i = 0; i < OWN; ++i) total[i] = next[THREADS * i + threadIdx.x];
    if (after) load_rows(rows_after, after, first);
    add_rows(sum, s.current, rows, first);
#pragma unroll 1
    for (int more = AT_ONCE; more < PART; more += AT_ONCE) {
        Rows others;
        load_rows(others, matrix, first + more);
        add_rows(sum, s.current, others, first + more);
    }
#pragma unroll
    for (int v = 0; v < COLUMNS; ++v)
#pragma unroll
        for (int i = 0; i < LANE_K; ++i) s.sums[warp][v][32 * i + lane] = sum[v][i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int at = THREADS * i + threadIdx.x;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total[i] += s.sums[w][at / KD][at % KD];
        next[at] = total[i];
        s.current[at / KD][at % KD] = total[i];
    }
    __syncthreads();
}

template <bool Backward> __device__ __forceinline__ void join(const ChunkParams& p, float* states) {
    let_next_kernel_start();
    wait_for_kernel_before();
    __shared__ Shared s;
    const int head = blockIdx.y, first = p.sequence_segment[blockIdx.z], last = p.sequence_segment[blockIdx.z + 1] - 1;
    const int step = Backward ? -1 : 1, steps = last - first - 1;
    if (steps <= 0) return;
    auto segment_at = [&](int number) { // of the segments whose ends are joined
        return (long long)(Backward ? last - 1 - number : first + 1 + number) * p.value_heads + head;
    };
    auto state_of = [&](long long segment) { return states + (segment * VD + blockIdx.x * COLUMNS) * KD; };
    auto matrix_of = [&](int number) {
        return number < steps ? p.transitions + (2 * segment_at(number) + Backward) * KD * KD : nullptr;
    };
    Rows rows[2];
    load_rows(rows[0], matrix_of(0), threadIdx.x / 32 * PART);
    for (int at = threadIdx.x; at < COLUMNS * KD; at += THREADS) s.current[at / KD][at % KD] = state_of(segment_at(0))[at];
    __syncthreads();
#pragma unroll 1
    for (int number = 0; number < steps; number += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = number + half;
            if (own >= steps) break;
            float* const next = state_of(segment_at(own) + step * p.value_heads);
            step_on(s, next, matrix_of(own), rows[half], rows[1 - half], matrix_of(own + 1));
        }
}

// Grid: V / COLUMNS, HV, N.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_join_states(const __grid_constant__ ChunkParams p) {
    join<false>(p, p.segment_states);
}

extern "C" __global__ void __launch_bounds__(THREADS) chunk_join_d_states(const __grid_constant__ ChunkParams p) {
    join<true>(p, p.segment_d_states);
}
