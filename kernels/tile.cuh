// Products of 16 x 16 tiles, in the four precisions of the chunk kernels.
//
// MODE says in which format the operands of every product are held; accumulators are always binary32:
//   0  f16     mma.sync m16n8k16, operands scaled by powers of two so that f16's range suffices
//   1  bf16    mma.sync m16n8k16
//   2  tf32    mma.sync m16n8k8, operands rounded to nearest (the hardware alone would truncate them)
//   3  f32     fused multiply-adds, no tensor core
//
// Fragment layout (that of mma.sync, for every mode): an accumulator tile has 16 rows and 8 columns; the thread with
// row = lane / 4 and quad = lane % 4 holds (row, 2 quad), (row, 2 quad + 1), (row + 8, 2 quad), (row + 8, 2 quad + 1).
// Two neighbouring accumulator tiles become the 16 x 16 left operand of the next product without leaving the thread.
#pragma once
#include "common.cuh"

#define MODE_F16 0
#define MODE_BF16 1
#define MODE_TF32 2
#define MODE_F32 3

#if MODE == MODE_F16 || MODE == MODE_BF16
typedef u16 operand;
#else
typedef float operand;
#endif
constexpr int OPERAND_BYTES = (int)sizeof(operand);

// Padding of a row in shared memory, in operands, such that the accesses of a fragment meet different banks.
constexpr int PAD = 8;

// Two values as one register of 16-bit operands, the first in the low half.
__device__ __forceinline__ u32 pack_16(float low, float high) {
    u32 packed;
#if MODE == MODE_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

__device__ __forceinline__ float round_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}

__device__ __forceinline__ operand to_operand(float x) {
#if MODE == MODE_F16
    return from_float<f16>(x).bits;
#elif MODE == MODE_BF16
    return from_float<bf16>(x).bits;
#elif MODE == MODE_TF32
    return round_tf32(x);
#else
    return x;
#endif
}

__device__ __forceinline__ float from_operand(operand x) {
#if MODE == MODE_F16
    f16 y = {x};
    return to_float(y);
#elif MODE == MODE_BF16
    bf16 y = {x};
    return to_float(y);
#else
    return x;
#endif
}

// Stores two neighbouring operands at once.
__device__ __forceinline__ void store_pair(operand* to, float first, float second) {
#if MODE == MODE_F16 || MODE == MODE_BF16
    *(u32*)to = pack_16(first, second);
#else
    *(float2*)to = make_float2(to_operand(first), to_operand(second));
#endif
}

__device__ __forceinline__ void store_four(operand* to, const float (&x)[4]) {
#if MODE == MODE_F16 || MODE == MODE_BF16
    *(uint2*)to = make_uint2(pack_16(x[0], x[1]), pack_16(x[2], x[3]));
#else
    *(float4*)to = make_float4(to_operand(x[0]), to_operand(x[1]), to_operand(x[2]), to_operand(x[3]));
#endif
}

__device__ __forceinline__ float2 load_pair(const operand* from) {
#if MODE == MODE_F16 || MODE == MODE_BF16
    u32 both = *(const u32*)from;
    return make_float2(from_operand((u16)both), from_operand((u16)(both >> 16)));
#else
    return *(const float2*)from;
#endif
}

// 1 / a power of two.
__device__ __forceinline__ float inverse_of(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// A power of two and its inverse, which bring a tensor into the range of the operand format.
struct Scale {
    float factor;
    float inverse;
};

// f16: brings `largest` between 2^14 and 2^15, so that what is 2^-28 of it is still a normal number; 0 may have any scale
// and gets the largest, which never decides where several meet. Other modes: 1.
__device__ __forceinline__ Scale scale_for(float largest) {
    Scale scale = {1.0f, 1.0f};
#if MODE == MODE_F16
    int exponent = (int)(__float_as_uint(largest) >> 23);
    int wanted = exponent == 0 ? 253 : min(max(254 + 14 - exponent, 1), 253);
    scale.factor = __uint_as_float((u32)wanted << 23);
    scale.inverse = inverse_of(scale.factor);
#endif
    return scale;
}

// What turns values of one scale into those of another. Never infinite: an all-zero tensor may have a scale that is out of
// proportion, and must stay zero.
__device__ __forceinline__ float ratio(Scale to, Scale from) {
    const float largest = __uint_as_float(254u << 23); // 2^127
    return fminf(to.factor * from.inverse, largest);
}

__device__ __forceinline__ Scale smaller(Scale a, Scale b) { return a.factor < b.factor ? a : b; }

// The largest of a non-negative value over the warp.
__device__ __forceinline__ float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

template <int N> __device__ __forceinline__ float largest_of(const float (&tiles)[N][4]) {
    float largest = 0.0f;
#if MODE == MODE_F16
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(tiles[n][e]));
    largest = warp_max(largest);
#endif
    return largest;
}

template <int N> __device__ __forceinline__ void clear(float (&tiles)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) tiles[n][e] = 0.0f;
}

template <int N> __device__ __forceinline__ void multiply(float (&tiles)[N][4], float factor) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) tiles[n][e] *= factor;
}

// The left operand of a product: 16 rows, 16 columns (the contracted index).
#if MODE == MODE_F16 || MODE == MODE_BF16
struct __align__(16) Left {
    u32 r[4];
};
#elif MODE == MODE_TF32
struct __align__(16) Left {
    u32 r[8];
};
#else
struct __align__(16) Left {
    float a[4], b[4]; // the two accumulator tiles as they are; the product asks the other lanes
};
#endif

// Two accumulator tiles side by side, times `factor`, as a left operand.
__device__ __forceinline__ Left make_left(const float (&a)[4], const float (&b)[4], float factor) {
    Left left;
#if MODE == MODE_F16 || MODE == MODE_BF16
    left.r[0] = pack_16(a[0] * factor, a[1] * factor);
    left.r[1] = pack_16(a[2] * factor, a[3] * factor);
    left.r[2] = pack_16(b[0] * factor, b[1] * factor);
    left.r[3] = pack_16(b[2] * factor, b[3] * factor);
#elif MODE == MODE_TF32
    // The contracted index is permuted alike on both sides: slot q holds column 2q, slot q + 4 column 2q + 1.
    left.r[0] = __float_as_uint(round_tf32(a[0] * factor));
    left.r[1] = __float_as_uint(round_tf32(a[2] * factor));
    left.r[2] = __float_as_uint(round_tf32(a[1] * factor));
    left.r[3] = __float_as_uint(round_tf32(a[3] * factor));
    left.r[4] = __float_as_uint(round_tf32(b[0] * factor));
    left.r[5] = __float_as_uint(round_tf32(b[2] * factor));
    left.r[6] = __float_as_uint(round_tf32(b[1] * factor));
    left.r[7] = __float_as_uint(round_tf32(b[3] * factor));
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        left.a[e] = a[e] * factor;
        left.b[e] = b[e] * factor;
    }
#endif
    return left;
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
#if MODE == MODE_F16 || MODE == MODE_BF16
__device__ __forceinline__ void mma_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if MODE == MODE_F16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#elif MODE == MODE_TF32
__device__ __forceinline__ void mma_1688(float (&c)[4], const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#if MODE == MODE_F32
// The four columns k of a left operand that lane `j` of each quad holds, for the rows `row` and `row + 8`.
struct LeftColumns {
    float r[2][4];
};
__device__ __forceinline__ LeftColumns columns_of_lane(const Left& left, int j) {
    LeftColumns columns;
    const int lane = (threadIdx.x & 28) + j;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        columns.r[e / 2][e % 2] = __shfl_sync(0xffffffffu, left.a[e], lane);
        columns.r[e / 2][2 + e % 2] = __shfl_sync(0xffffffffu, left.b[e], lane);
    }
    return columns;
}
#endif

// Loads of right operands that are started before the first product that needs one.
constexpr int LOADS_AHEAD = 4;

// acc += left * B for the tiles `begin` to `end` of a row of 16 x 16 tiles B, whose transposes lie in shared memory:
// element (k, n) at right[n pitch + k]. Two accumulator tiles belong to one tile of B.
template <int N>
__device__ __forceinline__ void product_nt(float (&acc)[N][4], const Left& left, const operand* right, int pitch,
                                           int begin = 0, int end = N / 2) {
    const int lane = threadIdx.x & 31;
#if MODE == MODE_F16 || MODE == MODE_BF16
    u32 address = shared_address(right + ((lane & 7) + (lane >> 4) * 8) * pitch + ((lane >> 3) & 1) * 8);
    // Several loads on their way before the first product needs one.
#pragma unroll
    for (int first = 0; first < N / 2; first += LOADS_AHEAD) {
        u32 b[LOADS_AHEAD][4];
#pragma unroll
        for (int n = first; n < first + LOADS_AHEAD && n < N / 2; ++n)
            if (n >= begin && n < end) load_matrices(b[n - first], address + 16 * n * pitch * OPERAND_BYTES);
#pragma unroll
        for (int n = first; n < first + LOADS_AHEAD && n < N / 2; ++n) {
            if (n < begin || n >= end) continue;
            mma_16816(acc[2 * n], left.r, b[n - first][0], b[n - first][1]);
            mma_16816(acc[2 * n + 1], left.r, b[n - first][2], b[n - first][3]);
        }
    }
#elif MODE == MODE_TF32
    const operand* at = right + (lane >> 2) * pitch + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (n / 2 < begin || n / 2 >= end) continue;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float2 b = *(const float2*)(at + 8 * n * pitch + 8 * k);
            mma_1688(acc[n], left.r + 4 * k, __float_as_uint(b.x), __float_as_uint(b.y));
        }
    }
#else
    const operand* at = right + 2 * (lane & 3) * pitch;
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
        const LeftColumns a = columns_of_lane(left, j);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n / 2 < begin || n / 2 >= end) continue;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float2 b = *(const float2*)(at + 8 * n * pitch + 8 * k + 2 * j);
                const float2 d = *(const float2*)(at + (8 * n + 1) * pitch + 8 * k + 2 * j);
                acc[n][0] = fmaf(a.r[0][2 * k + 1], b.y, fmaf(a.r[0][2 * k], b.x, acc[n][0]));
                acc[n][1] = fmaf(a.r[0][2 * k + 1], d.y, fmaf(a.r[0][2 * k], d.x, acc[n][1]));
                acc[n][2] = fmaf(a.r[1][2 * k + 1], b.y, fmaf(a.r[1][2 * k], b.x, acc[n][2]));
                acc[n][3] = fmaf(a.r[1][2 * k + 1], d.y, fmaf(a.r[1][2 * k], d.x, acc[n][3]));
            }
        }
    }
#endif
}

// acc += left * B for the tiles `begin` to `end` of a row of 16 x 16 tiles B in shared memory: element (k, n) at
// right[k pitch + n]. With a rest, acc += (left + rest) * B.
template <int N>
__device__ __forceinline__ void product_nn(float (&acc)[N][4], const Left& left, const operand* right, int pitch,
                                           int begin = 0, int end = N / 2, const Left* rest = nullptr) {
    const int lane = threadIdx.x & 31;
#if MODE == MODE_F16 || MODE == MODE_BF16
    u32 address = shared_address(right + (lane & 15) * pitch + (lane >> 4) * 8);
#pragma unroll
    for (int first = 0; first < N / 2; first += LOADS_AHEAD) {
        u32 b[LOADS_AHEAD][4];
#pragma unroll
        for (int n = first; n < first + LOADS_AHEAD && n < N / 2; ++n)
            if (n >= begin && n < end) load_matrices_transposed(b[n - first], address + 16 * n * OPERAND_BYTES);
#pragma unroll
        for (int n = first; n < first + LOADS_AHEAD && n < N / 2; ++n) {
            if (n < begin || n >= end) continue;
            mma_16816(acc[2 * n], left.r, b[n - first][0], b[n - first][1]);
            mma_16816(acc[2 * n + 1], left.r, b[n - first][2], b[n - first][3]);
        }
        if (rest) {
#pragma unroll
            for (int n = first; n < first + LOADS_AHEAD && n < N / 2; ++n) {
                if (n < begin || n >= end) continue;
                mma_16816(acc[2 * n], rest->r, b[n - first][0], b[n - first][1]);
                mma_16816(acc[2 * n + 1], rest->r, b[n - first][2], b[n - first][3]);
            }
        }
    }
#elif MODE == MODE_TF32
    const operand* at = right + 2 * (lane & 3) * pitch + (lane >> 2);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (n / 2 < begin || n / 2 >= end) continue;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const operand* b = at + 8 * k * pitch + 8 * n;
            mma_1688(acc[n], left.r + 4 * k, __float_as_uint(b[0]), __float_as_uint(b[pitch]));
        }
    }
#else
    const operand* at = right + 2 * (lane & 3);
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
        const LeftColumns a = columns_of_lane(left, j);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n / 2 < begin || n / 2 >= end) continue;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 b = *(const float2*)(at + (8 * (k / 2) + 2 * j + k % 2) * pitch + 8 * n);
                acc[n][0] = fmaf(a.r[0][k], b.x, acc[n][0]);
                acc[n][1] = fmaf(a.r[0][k], b.y, acc[n][1]);
                acc[n][2] = fmaf(a.r[1][k], b.x, acc[n][2]);
                acc[n][3] = fmaf(a.r[1][k], b.y, acc[n][3]);
            }
        }
    }
#endif
}

// Two products with the same right operand, which is loaded once: as product_nt and product_nn.
template <int N>
__device__ __forceinline__ void products_nt(float (&first)[N][4], const Left& of_first, float (&second)[N][4],
                                            const Left& of_second, const operand* right, int pitch) {
#if MODE == MODE_F16 || MODE == MODE_BF16
    const int lane = threadIdx.x & 31;
    const u32 address = shared_address(right + ((lane & 7) + (lane >> 4) * 8) * pitch + ((lane >> 3) & 1) * 8);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        u32 b[4];
        load_matrices(b, address + 16 * n * pitch * OPERAND_BYTES);
        mma_16816(first[2 * n], of_first.r, b[0], b[1]);
        mma_16816(first[2 * n + 1], of_first.r, b[2], b[3]);
        mma_16816(second[2 * n], of_second.r, b[0], b[1]);
        mma_16816(second[2 * n + 1], of_second.r, b[2], b[3]);
    }
#else
    product_nt(first, of_first, right, pitch);
    product_nt(second, of_second, right, pitch);
#endif
}
template <int N>
__device__ __forceinline__ void products_nn(float (&first)[N][4], const Left& of_first, float (&second)[N][4],
                                            const Left& of_second, const operand* right, int pitch) {
#if MODE == MODE_F16 || MODE == MODE_BF16
    const int lane = threadIdx.x & 31;
    const u32 address = shared_address(right + (lane & 15) * pitch + (lane >> 4) * 8);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        u32 b[4];
        load_matrices_transposed(b, address + 16 * n * OPERAND_BYTES);
        mma_16816(first[2 * n], of_first.r, b[0], b[1]);
        mma_16816(first[2 * n + 1], of_first.r, b[2], b[3]);
        mma_16816(second[2 * n], of_second.r, b[0], b[1]);
        mma_16816(second[2 * n + 1], of_second.r, b[2], b[3]);
    }
#else
    product_nn(first, of_first, right, pitch);
    product_nn(second, of_second, right, pitch);
#endif
}

// The left operand in shared memory: element (m, k) at from[m pitch + k].
__device__ __forceinline__ Left load_left(const operand* from, int pitch) {
    int lane = threadIdx.x & 31;
    Left left;
#if MODE == MODE_F16 || MODE == MODE_BF16
    load_matrices(left.r, shared_address(from + (lane & 15) * pitch + (lane >> 4) * 8));
#elif MODE == MODE_TF32
    int row = lane >> 2, quad = lane & 3;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float2 a = *(const float2*)(from + row * pitch + 8 * k + 2 * quad);
        float2 b = *(const float2*)(from + (row + 8) * pitch + 8 * k + 2 * quad);
        left.r[4 * k] = __float_as_uint(a.x);
        left.r[4 * k + 1] = __float_as_uint(b.x);
        left.r[4 * k + 2] = __float_as_uint(a.y);
        left.r[4 * k + 3] = __float_as_uint(b.y);
    }
#else
    const operand* at = from + (lane >> 2) * pitch + 2 * (lane & 3);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        left.a[e] = at[8 * (e / 2) * pitch + e % 2];
        left.b[e] = at[8 * (e / 2) * pitch + 8 + e % 2];
    }
#endif
    return left;
}

// The left operand whose transpose lies in shared memory: element (m, k) at from[k pitch + m].
__device__ __forceinline__ Left load_left_transposed(const operand* from, int pitch) {
    int lane = threadIdx.x & 31;
    Left left;
#if MODE == MODE_F16 || MODE == MODE_BF16
    load_matrices_transposed(left.r,
                             shared_address(from + ((lane & 7) + (lane >> 4) * 8) * pitch + ((lane >> 3) & 1) * 8));
#elif MODE == MODE_TF32
    int row = lane >> 2, quad = lane & 3;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float* a = from + (8 * k + 2 * quad) * pitch + row;
        left.r[4 * k] = __float_as_uint(a[0]);
        left.r[4 * k + 1] = __float_as_uint(a[8]);
        left.r[4 * k + 2] = __float_as_uint(a[pitch]);
        left.r[4 * k + 3] = __float_as_uint(a[pitch + 8]);
    }
#else
    const operand* at = from + 2 * (lane & 3) * pitch + (lane >> 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        left.a[e] = at[e % 2 * pitch + 8 * (e / 2)];
        left.b[e] = at[(8 + e % 2) * pitch + 8 * (e / 2)];
    }
#endif
    return left;
}

// What was lost when the tiles became `rounded`, as a second operand: together they hold twice the digits. Only f16 needs it.
__device__ __forceinline__ Left make_left_rest(const float (&a)[4], const float (&b)[4], float factor, const Left& rounded) {
    float rest[2][4];
    clear(rest);
#if MODE == MODE_F16
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        f16 x = {(u16)(rounded.r[e / 2] >> (16 * (e % 2)))};
        rest[e / 4][e % 4] = (e < 4 ? a : b)[e % 4] * factor - to_float(x);
    }
#endif
    return make_left(rest[0], rest[1], 1.0f);
}
constexpr bool HAS_REST = MODE == MODE_F16;

// Multiplies a left operand by a power of two.
__device__ __forceinline__ void scale_left(Left& left, float factor) {
#if MODE == MODE_F16
    u32 both = pack_16(factor, factor);
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(left.r[i]) : "r"(both));
#endif
}
