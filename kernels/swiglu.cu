// The product in the middle of a SwiGLU:
//
//   h = silu(gate) * up      dgate = dh * up * silu'(gate)      dup = dh * silu(gate)
//
//   gate_up (rows, 2 F): F of gate, then F of up; h, dh (rows, F); all in bf16
//
// A thread takes eight neighbouring elements. The backward gives h once more, so that nobody has to keep it: h may lie where
// dh lies, and d_gate_up where gate_up lies.
#include "layer.cuh"

struct SwiGlu {
    const bf16* gate_up; // (rows, 2 F)
    const bf16* dh;      // (rows, F), of the backward
    bf16* h;             // (rows, F)
    bf16* d_gate_up;     // (rows, 2 F), of the backward
    u32 count;           // accesses to h, rows F / 8
    u32 vectors;         // accesses to a row of h, F / 8
};

constexpr int THREADS = 256;

// Grid: count / THREADS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) swiglu_forward(const __grid_constant__ SwiGlu p) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const u32 row = i / p.vectors, width = WIDE * p.vectors;
    const u64 at = (u64)row * 2 * width + WIDE * (i - row * p.vectors);
    wait_for_kernel_before();
    float gate[WIDE], h[WIDE];
    load_eight(p.gate_up + at, gate);
    load_eight(p.gate_up + at + width, h);
#pragma unroll
    for (int e = 0; e < WIDE; ++e) h[e] *= silu(gate[e]);
    store_eight(p.h + (u64)WIDE * i, h);
}

// Grid: count / THREADS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) swiglu_backward(const __grid_constant__ SwiGlu p) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const u32 row = i / p.vectors, width = WIDE * p.vectors;
    const u64 at = (u64)row * 2 * width + WIDE * (i - row * p.vectors);
    wait_for_kernel_before();
    float gate[WIDE], up[WIDE], dh[WIDE], h[WIDE];
    load_eight(p.gate_up + at, gate);
    load_eight(p.gate_up + at + width, up);
    load_eight(p.dh + (u64)WIDE * i, dh);
#pragma unroll
    for (int e = 0; e < WIDE; ++e) {
        const float2 s = silu_with_slope(gate[e]);
        h[e] = s.x * up[e];
        gate[e] = dh[e] * up[e] * s.y;
        up[e] = dh[e] * s.x;
    }
    store_eight(p.h + (u64)WIDE * i, h);
    store_eight(p.d_gate_up + at, gate);
    store_eight(p.d_gate_up + at + width, up);
}
