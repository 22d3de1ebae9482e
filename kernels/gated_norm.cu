// The gated RMSNorm behind GDN, over the V channels of each token and head, with a weight that all heads share:
//
//   r = (sum o^2 / V + eps)^-1/2      n = o r      y = n * weight * silu(z)
//   dz = dy * n * weight * silu'(z)      dweight = sum_rows dy * silu(z) * n
//   dn = dy * silu(z) * weight      do = r (dn - n (n . dn) / V)
//
//   o, y, dy, do (tokens, H, V) in bf16; z, dz columns of matrices (tokens, pitch) in bf16; weight, dweight (V) in binary32
//
// A row of V is in the registers of LANES lanes, from its only read to its only write. The backward gives y once more, so that
// nobody has to keep it: y may lie where dy lies, do where o lies.
//
// Compiled in: VALUE_DIM (V), LANES (of a row, a power of two).
#include "layer.cuh"

struct GatedNorm {
    const bf16* o;       // (tokens, H, V)
    const bf16* z;       // (tokens, pitch), from its first column on
    const float* weight; // (V)
    bf16* y;             // (tokens, H, V)
    const bf16* dy;      // (tokens, H, V), of the backward, like all that follow
    bf16* d_o;           // (tokens, H, V)
    bf16* dz;            // (tokens, d_pitch), from its first column on
    float* parts;        // (blocks, V) of dweight
    int rows;            // tokens H
    int heads;           // H
    int pitch;           // elements from a row of z to the next
    int d_pitch;
    float eps;
};

constexpr int THREADS = 256;
constexpr int GROUPS = THREADS / LANES;    // rows at once
constexpr int VECTORS = VALUE_DIM / WIDE;  // accesses of a row
constexpr int TURNS = 16;                  // rows of a group in the backward

static_assert(VALUE_DIM % WIDE == 0 && VECTORS <= LANES && LANES <= 32, "a lane has one access of a row");

__device__ __forceinline__ long long gate_at(int row, int heads, int pitch) {
    const int token = row / heads;
    return (long long)token * pitch + (row - token * heads) * VALUE_DIM;
}

__device__ __forceinline__ float inverse_rms(const float (&o)[WIDE], float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < WIDE; ++e) squares += o[e] * o[e];
    return rsqrtf(lane_sum<LANES>(squares) * (1.0f / VALUE_DIM) + eps);
}

// Grid: rows / GROUPS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) gated_norm_forward(const __grid_constant__ GatedNorm p) {
    const int row = blockIdx.x * GROUPS + threadIdx.x / LANES, column = WIDE * (threadIdx.x % LANES);
    const bool inside = row < p.rows && column < VALUE_DIM;
    const long long at = (long long)row * VALUE_DIM + column;
    wait_for_kernel_before();
    float o[WIDE], z[WIDE], weight[WIDE];
    clear(o);
    clear(z);
    clear(weight);
    if (inside) {
        load_eight(p.o + at, o);
        load_eight(p.z + gate_at(row, p.heads, p.pitch) + column, z);
        load_eight(p.weight + column, weight);
    }
    const float r = inverse_rms(o, p.eps);
#pragma unroll
    for (int e = 0; e < WIDE; ++e) o[e] *= r * weight[e] * silu(z[e]);
    if (inside) store_eight(p.y + at, o);
}

// Grid: rows / (GROUPS TURNS) rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) gated_norm_backward(const __grid_constant__ GatedNorm p) {
    __shared__ __align__(16) float sums[VALUE_DIM];
    const int group = threadIdx.x / LANES, column = WIDE * (threadIdx.x % LANES);
    wait_for_kernel_before();
    float weight[WIDE], dweight[WIDE];
    clear(weight);
    clear(dweight);
    if (column < VALUE_DIM) load_eight(p.weight + column, weight);
#pragma unroll 2
    for (int turn = 0; turn < TURNS; ++turn) {
        const int row = (blockIdx.x * TURNS + turn) * GROUPS + group;
        const bool inside = row < p.rows && column < VALUE_DIM;
        const long long at = (long long)row * VALUE_DIM + column;
        float n[WIDE], z[WIDE], dn[WIDE];
        clear(n);
        clear(z);
        clear(dn);
        if (inside) {
            load_eight(p.o + at, n);
            load_eight(p.z + gate_at(row, p.heads, p.pitch) + column, z);
            load_eight(p.dy + at, dn);
        }
        const float r = inverse_rms(n, p.eps);
        float y[WIDE], inner = 0.0f;
#pragma unroll
        for (int e = 0; e < WIDE; ++e) {
            const float2 s = silu_with_slope(z[e]);
            n[e] *= r;
            y[e] = n[e] * weight[e] * s.x;
            z[e] = dn[e] * n[e] * weight[e] * s.y;
            dn[e] *= s.x;
            dweight[e] += dn[e] * n[e];
            dn[e] *= weight[e];
            inner += dn[e] * n[e];
        }
        inner = lane_sum<LANES>(inner) * (1.0f / VALUE_DIM);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) dn[e] = r * (dn[e] - n[e] * inner);
        if (inside) {
            store_eight(p.y + at, y);
            store_eight(p.dz + gate_at(row, p.heads, p.d_pitch) + column, z);
            store_eight(p.d_o + at, dn);
        }
    }
    // The groups one after the other.
    for (int g = 0; g < GROUPS; ++g) {
        if (g == group && column < VALUE_DIM) {
            float sum[WIDE];
            clear(sum);
            if (g > 0) load_eight(sums + column, sum);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) sum[e] += dweight[e];
            store_eight(sums + column, sum);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < VALUE_DIM; i += THREADS) p.parts[(long long)blockIdx.x * VALUE_DIM + i] = sums[i];
}
