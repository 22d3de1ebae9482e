// The short convolution of GDN: causal, depthwise, four tokens wide, followed by SiLU, on q | k | v of a fused projection.
//
//   u_tc = sum_j w_cj x_{t - 3 + j, c}      y = silu(u)
//   du = dy silu'(u)      dx_tc = sum_j w_cj du_{t + 3 - j, c}      dw_cj = sum_t du_tc x_{t - 3 + j, c}
//
//   x, dx (B T, pitch) in bf16, of which the first 2 QK + VALUES columns are q | k | v; w, dw (channels, 4) in binary32
//   q, k, dq, dk (B T, QK), v, dv (B T, VALUES) in bf16
//
// Rows of a batch do not see each other: before the first token of each there are zeros. A thread walks along a run of
// tokens with some neighbouring channels, and keeps the last three tokens in registers. The backward computes u again. Its
// run begins three tokens early with x and ends three tokens late with du; the sum for dw is over its own tokens.
#include "layer.cuh"

struct ShortConv {
    const bf16* x;     // (B T, pitch)
    const float* taps; // (channels, 4)
    bf16* q;           // (B T, QK), of the forward
    bf16* k;
    bf16* v;
    const bf16* dq; // (B T, QK), of the backward
    const bf16* dk;
    const bf16* dv;
    bf16* dx;     // (B T, d_pitch)
    float* parts; // (B runs, channels, 4) of dw
    int pitch;    // elements from a row of x to the next
    int d_pitch;
    int qk_width;    // QK
    int value_width; // VALUES
    int tokens;      // T
    int runs;        // of a row of the batch
};

constexpr int THREADS = 128;
constexpr int TAPS = 4;
constexpr int FORWARD_RUN = 16, FORWARD_BATCH = 4; // tokens of a thread, and of them in flight at once
constexpr int BACKWARD_RUN = 64, BACKWARD_BATCH = 4;
constexpr int NARROW = 4; // channels of a thread in the backward, whose sums take many registers

// Where neighbouring channels lie among q, k and v.
struct Place {
    int tensor;    // 0 q, 1 k, 2 v
    int width;     // of that tensor
    int in_tensor; // the first channel in a row of it
};

__device__ __forceinline__ Place place_of(const ShortConv& p, int channel) {
    if (channel < p.qk_width) return {0, p.qk_width, channel};
    if (channel < 2 * p.qk_width) return {1, p.qk_width, channel - p.qk_width};
    return {2, p.value_width, channel - 2 * p.qk_width};
}

__device__ __forceinline__ void unpack_four(const uint2& packed, float (&x)[4]) {
    x[0] = __uint_as_float(packed.x << 16), x[1] = __uint_as_float(packed.x & 0xffff0000u);
    x[2] = __uint_as_float(packed.y << 16), x[3] = __uint_as_float(packed.y & 0xffff0000u);
}

template <int Channels>
__device__ __forceinline__ void load_taps(const float* taps, int channel, float (&w)[Channels][TAPS]) {
#pragma unroll
    for (int e = 0; e < Channels; ++e) {
        const float4 four = *(const float4*)(taps + TAPS * (channel + e));
        w[e][0] = four.x, w[e][1] = four.y, w[e][2] = four.z, w[e][3] = four.w;
    }
}

// Grid: B runs, channels / (8 THREADS) rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) short_conv_forward(const __grid_constant__ ShortConv p) {
    const int channel = WIDE * (blockIdx.y * THREADS + threadIdx.x);
    wait_for_kernel_before();
    if (channel >= 2 * p.qk_width + p.value_width) return;
    const Place place = place_of(p, channel);
    const int first = blockIdx.x % p.runs * FORWARD_RUN;
    const long long row = (long long)(blockIdx.x / p.runs) * p.tokens;
    const bf16* x = p.x + row * p.pitch + channel;
    bf16* y = (place.tensor == 0 ? p.q : place.tensor == 1 ? p.k : p.v) + row * place.width + place.in_tensor;
    float w[WIDE][TAPS];
    load_taps(p.taps, channel, w);

    const uint4 zeros = make_uint4(0, 0, 0, 0);
    uint4 window[TAPS - 1];
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) {
        const int t = first - (TAPS - 1) + j;
        window[j] = t >= 0 ? load_packed(x + (long long)t * p.pitch) : zeros;
    }
#pragma unroll 1
    for (int batch = first; batch < first + FORWARD_RUN; batch += FORWARD_BATCH) {
        uint4 seen[TAPS - 1 + FORWARD_BATCH];
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) seen[j] = window[j];
#pragma unroll
        for (int i = 0; i < FORWARD_BATCH; ++i)
            seen[TAPS - 1 + i] = batch + i < p.tokens ? load_packed(x + (long long)(batch + i) * p.pitch) : zeros;
#pragma unroll
        for (int i = 0; i < FORWARD_BATCH; ++i) {
            float u[WIDE];
            clear(u);
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                float value[WIDE];
                unpack(seen[i + j], value);
#pragma unroll
                for (int e = 0; e < WIDE; ++e) u[e] += w[e][j] * value[e];
            }
#pragma unroll
            for (int e = 0; e < WIDE; ++e) u[e] = silu(u[e]);
            if (batch + i < p.tokens) store_eight(y + (long long)(batch + i) * place.width, u);
        }
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) window[j] = seen[FORWARD_BATCH + j];
    }
}

// Grid: B runs, channels / (4 THREADS) rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) short_conv_backward(const __grid_constant__ ShortConv p) {
    const int channel = NARROW * (blockIdx.y * THREADS + threadIdx.x), channels = 2 * p.qk_width + p.value_width;
    wait_for_kernel_before();
    if (channel >= channels) return;
    const Place place = place_of(p, channel);
    const int first = blockIdx.x % p.runs * BACKWARD_RUN;
    const int end = min(first + BACKWARD_RUN, p.tokens); // of the own tokens
    const int last = end + TAPS - 1;                     // of those whose du is wanted
    const long long row = (long long)(blockIdx.x / p.runs) * p.tokens;
    const bf16* x = p.x + row * p.pitch + channel;
    const bf16* dy = (place.tensor == 0 ? p.dq : place.tensor == 1 ? p.dk : p.dv) + row * place.width + place.in_tensor;
    bf16* dx = p.dx + row * p.d_pitch + channel;
    float w[NARROW][TAPS], dw[NARROW][TAPS];
    load_taps(p.taps, channel, w);
#pragma unroll
    for (int e = 0; e < NARROW; ++e)
#pragma unroll
        for (int j = 0; j < TAPS; ++j) dw[e][j] = 0.0f;

    const uint2 zeros = make_uint2(0, 0);
    uint2 window[TAPS - 1];
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) {
        const int t = first - (TAPS - 1) + j;
        window[j] = t >= 0 ? *(const uint2*)(x + (long long)t * p.pitch) : zeros;
    }
    // After token t: what du up to t gives to dx of the tokens t - 2, t - 1 and t.
    float pending[TAPS - 1][NARROW];
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j)
#pragma unroll
        for (int e = 0; e < NARROW; ++e) pending[j][e] = 0.0f;

#pragma unroll 1
    for (int batch = first; batch < last; batch += BACKWARD_BATCH) {
        uint2 seen[TAPS - 1 + BACKWARD_BATCH], gradient[BACKWARD_BATCH];
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) seen[j] = window[j];
#pragma unroll
        for (int i = 0; i < BACKWARD_BATCH; ++i) {
            const int t = batch + i;
            const bool inside = t < last && t < p.tokens;
            seen[TAPS - 1 + i] = inside ? *(const uint2*)(x + (long long)t * p.pitch) : zeros;
            gradient[i] = inside ? *(const uint2*)(dy + (long long)t * place.width) : zeros;
        }
#pragma unroll
        for (int i = 0; i < BACKWARD_BATCH; ++i) {
            const int t = batch + i;
            float value[TAPS][NARROW], du[NARROW];
#pragma unroll
            for (int j = 0; j < TAPS; ++j) unpack_four(seen[i + j], value[j]);
            unpack_four(gradient[i], du);
#pragma unroll
            for (int e = 0; e < NARROW; ++e) {
                float u = 0.0f;
#pragma unroll
                for (int j = 0; j < TAPS; ++j) u += w[e][j] * value[j][e];
                du[e] *= silu_with_slope(u).y;
                if (t < end)
#pragma unroll
                    for (int j = 0; j < TAPS; ++j) dw[e][j] += du[e] * value[j][e];
            }
            // With du of token t, dx of token t - 3 is complete.
            float complete[NARROW];
#pragma unroll
            for (int e = 0; e < NARROW; ++e) {
                complete[e] = pending[0][e] + w[e][0] * du[e];
                pending[0][e] = pending[1][e] + w[e][1] * du[e];
                pending[1][e] = pending[2][e] + w[e][2] * du[e];
                pending[2][e] = w[e][3] * du[e];
            }
            const int done = t - (TAPS - 1);
            if (done >= first && done < end)
                *(uint2*)(dx + (long long)done * p.d_pitch) =
                    make_uint2(packed_pair(complete[0], complete[1]), packed_pair(complete[2], complete[3]));
        }
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) window[j] = seen[BACKWARD_BATCH + j];
    }
    float* parts = p.parts + ((long long)blockIdx.x * channels + channel) * TAPS;
#pragma unroll
    for (int e = 0; e < NARROW; ++e)
        *(float4*)(parts + TAPS * e) = make_float4(dw[e][0], dw[e][1], dw[e][2], dw[e][3]);
}
