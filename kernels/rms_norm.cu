// RMSNorm of the residual stream, with the addition to it:
//
//   x = stream + branch      r = (sum x^2 / D + eps)^-1/2      n = x r      y = n * weight
//   dn = dy * weight         dx = r (dn - n (n . dn) / D) + d_stream        dweight = sum_rows dy * n
//
//   stream, branch, d_stream, x, y, dx (rows, D) in bf16; weight, dweight (D) in binary32
//
// x is rounded before it is normed, since the backward has nothing else. A row is in the registers of one warp, or of WARPS,
// from its only read to its only write. The backward gives y once more, so that nobody has to keep it; dx may lie where
// d_stream or dy lies.
//
// Compiled in: DIM (D), WARPS (warps of a row).
#include "layer.cuh"

struct RmsNormForward {
    const bf16* stream;  // (rows, D)
    const bf16* branch;  // (rows, D), or null: x is the stream
    const float* weight; // (D)
    bf16* x;             // (rows, D); not written without a branch
    bf16* y;             // (rows, D)
    int rows;
    float eps;
};

struct RmsNormBackward {
    const bf16* x;        // (rows, D)
    const bf16* dy;       // (rows, D)
    const bf16* d_stream; // (rows, D), or null: zeros
    const float* weight;  // (D)
    bf16* dx;             // (rows, D)
    bf16* y;              // (rows, D), or null
    float* parts;         // (blocks, D) of dweight
    int rows;
    float eps;
};

constexpr int THREADS = 256;
constexpr int GROUPS = THREADS / (32 * WARPS); // rows at once
constexpr int VECTORS = DIM / WIDE;            // accesses of a row
constexpr int OWN = (VECTORS + 32 * WARPS - 1) / (32 * WARPS);
constexpr int TURNS = 8; // rows of a group in the backward

static_assert(DIM % WIDE == 0 && OWN <= 3, "a row is a whole number of accesses, and fits into registers");
static_assert(WARPS == 1 || WARPS == 2 || WARPS == 4 || WARPS == 8, "rows share a block evenly");

// The sums of x and y over the threads of a row, in each of them. All threads of the block call it.
__device__ __forceinline__ float2 row_sums(float x, float y) {
    x = lane_sum<32>(x);
    y = lane_sum<32>(y);
    if (WARPS == 1) return make_float2(x, y);
    __shared__ float2 sums[THREADS / 32];
    const int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[warp] = make_float2(x, y);
    __syncthreads();
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        sum.x += sums[first + w].x;
        sum.y += sums[first + w].y;
    }
    return sum;
}

// Grid: rows / GROUPS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS, 4) rms_norm_forward(const __grid_constant__ RmsNormForward p) {
    const int group = threadIdx.x / (32 * WARPS), lane = threadIdx.x % (32 * WARPS);
    const int row = blockIdx.x * GROUPS + group;
    const long long at = (long long)row * DIM;
    wait_for_kernel_before();
    float x[OWN][WIDE], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int vector = lane + 32 * WARPS * i;
        clear(x[i]);
        if (row >= p.rows || vector >= VECTORS) continue;
        load_eight(p.stream + at + WIDE * vector, x[i]);
        if (p.branch) {
            float added[WIDE];
            load_eight(p.branch + at + WIDE * vector, added);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) x[i][e] += added[e];
            const uint4 rounded = packed(x[i]);
            *(uint4*)(p.x + at + WIDE * vector) = rounded;
            unpack(rounded, x[i]);
        }
#pragma unroll
        for (int e = 0; e < WIDE; ++e) squares += x[i][e] * x[i][e];
    }
    const float r = rsqrtf(row_sums(squares, 0.0f).x * (1.0f / DIM) + p.eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int vector = lane + 32 * WARPS * i;
        if (row >= p.rows || vector >= VECTORS) continue;
        float weight[WIDE];
        load_eight(p.weight + WIDE * vector, weight);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) x[i][e] *= r * weight[e];
        store_eight(p.y + at + WIDE * vector, x[i]);
    }
}

// Grid: rows / (GROUPS TURNS) rounded up.
extern "C" __global__ void __launch_bounds__(THREADS, 2) rms_norm_backward(const __grid_constant__ RmsNormBackward p) {
    __shared__ __align__(16) float sums[DIM];
    const int group = threadIdx.x / (32 * WARPS), lane = threadIdx.x % (32 * WARPS);
    wait_for_kernel_before();
    float dweight[OWN][WIDE];
#pragma unroll
    for (int i = 0; i < OWN; ++i) clear(dweight[i]);
#pragma unroll 1
    for (int turn = 0; turn < TURNS; ++turn) {
        const int row = (blockIdx.x * TURNS + turn) * GROUPS + group;
        const long long at = (long long)row * DIM;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        uint4 packed_x[OWN], packed_dy[OWN], d_stream[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int vector = lane + 32 * WARPS * i;
            const bool inside = row < p.rows && vector < VECTORS;
            packed_x[i] = inside ? load_packed(p.x + at + WIDE * vector) : zeros;
            packed_dy[i] = inside ? load_packed(p.dy + at + WIDE * vector) : zeros;
            d_stream[i] = inside && p.d_stream ? load_packed(p.d_stream + at + WIDE * vector) : zeros;
        }
        float squares = 0.0f, inner = 0.0f; // of x, and of x with dn
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int vector = lane + 32 * WARPS * i;
            if (vector >= VECTORS) continue;
            float x[WIDE], dy[WIDE], weight[WIDE];
            unpack(packed_x[i], x);
            unpack(packed_dy[i], dy);
            load_eight(p.weight + WIDE * vector, weight);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) {
                squares += x[e] * x[e];
                inner += dy[e] * weight[e] * x[e];
            }
        }
        const float2 sums_of_row = row_sums(squares, inner);
        const float r = rsqrtf(sums_of_row.x * (1.0f / DIM) + p.eps);
        inner = sums_of_row.y * r * (1.0f / DIM);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int vector = lane + 32 * WARPS * i;
            if (row >= p.rows || vector >= VECTORS) continue;
            float x[WIDE], dy[WIDE], weight[WIDE], y[WIDE], dx[WIDE];
            unpack(packed_x[i], x);
            unpack(packed_dy[i], dy);
            unpack(d_stream[i], dx);
            load_eight(p.weight + WIDE * vector, weight);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) {
                const float n = x[e] * r;
                dweight[i][e] += dy[e] * n;
                y[e] = n * weight[e];
                dx[e] += r * (dy[e] * weight[e] - n * inner);
            }
            if (p.y) store_eight(p.y + at + WIDE * vector, y);
            store_eight(p.dx + at + WIDE * vector, dx);
        }
    }
    // The groups one after the other.
    for (int g = 0; g < GROUPS; ++g) {
        if (g == group)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int vector = lane + 32 * WARPS * i;
                if (vector >= VECTORS) continue;
                float sum[WIDE];
                clear(sum);
                if (g > 0) load_eight(sums + WIDE * vector, sum);
#pragma unroll
                for (int e = 0; e < WIDE; ++e) sum[e] += dweight[i][e];
                store_eight(sums + WIDE * vector, sum);
            }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < DIM; i += THREADS) p.parts[(long long)blockIdx.x * DIM + i] = sums[i];
}
