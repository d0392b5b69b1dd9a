// Gated activations: y = a(g) b(u). Backward: dg = dy b(u) a'(g), du = dy a(g) b'(u). But for clamped_swiglu b(u) is u.
//
// An activation is a struct under its name in config.json, with the value and the slope of a, and the factor b and its
// slope; ACTIVATION is defined as the one to compile. Matrices may be column ranges of wider ones (row strides). The
// exponential and the reciprocal are the hardware's approximations, a few units in the last place of f32. Widths or
// strides that are no multiple of 8, or pointers off the 16-byte grid, go one value at a time.

// Vectors of one thread whose loads are in flight together.
static constexpr int AT_ONCE = 2;

struct plain_up {
    static DEVICE float factor(float u) { return u; }
    static DEVICE float through(float, float gradient) { return gradient; }
};

struct silu : plain_up {
    static DEVICE float sigmoid(float g) { return reciprocal_fast(1.0f + exp_fast(-g)); }
    static DEVICE float value(float g) { return g * sigmoid(g); }
    static DEVICE void value_and_slope(float g, float &value, float &slope) {
        const float s = sigmoid(g);
        value = g * s;
        slope = s + value * (1.0f - s);
    }
};

struct gelu_pytorch_tanh : plain_up {
    static constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.044715f;   // 2 sqrt(2 / pi)

    // (1 + tanh(u)) / 2 is the logistic function of 2 u.
    static DEVICE float sigma(float g) { return silu::sigmoid(LINEAR * g * (1.0f + CUBIC * g * g)); }
    static DEVICE float value(float g) { return g * sigma(g); }
    static DEVICE void value_and_slope(float g, float &value, float &slope) {
        const float s = sigma(g);
        value = g * s;
        slope = s + value * (1.0f - s) * (LINEAR * (1.0f + 3.0f * CUBIC * g * g));
    }
};

struct sigmoid : plain_up {
    static DEVICE float value(float g) { return silu::sigmoid(g); }
    static DEVICE void value_and_slope(float g, float &value, float &slope) {
        value = silu::sigmoid(g);
        slope = value * (1.0f - value);
    }
};

// Gates of at most LIMIT, times one more than what is clamped at both sides; beyond a limit gradients are zero. The
// constants come as the bits of floats.
template <unsigned ALPHA_BITS, unsigned LIMIT_BITS> struct clamped_swiglu {
#define ALPHA __uint_as_float(ALPHA_BITS)
#define LIMIT __uint_as_float(LIMIT_BITS)
    static DEVICE float value(float g) {
        g = fminf(g, LIMIT);
        return g * silu::sigmoid(ALPHA * g);
    }
    static DEVICE void value_and_slope(float g, float &value, float &slope) {
        const float clamped = fminf(g, LIMIT), s = silu::sigmoid(ALPHA * clamped);
        value = clamped * s;
        slope = g <= LIMIT ? s + ALPHA * value * (1.0f - s) : 0.0f;
    }
    static DEVICE float factor(float u) { return fminf(fmaxf(u, -LIMIT), LIMIT) + 1.0f; }
    static DEVICE float through(float u, float gradient) { return fabsf(u) <= LIMIT ? gradient : 0.0f; }
#undef ALPHA
#undef LIMIT
};

// a(g) b(u), in the place of g.
template <int V> DEVICE void gated_values(float (&g)[V], const float (&u)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = ACTIVATION::value(g[i]) * ACTIVATION::factor(u[i]);
}

// dg and du from dy, in the places of g and u; and a(g) b(u).
template <int V>
DEVICE void gated_gradients(float (&g)[V], float (&u)[V], const float (&dy)[V], float (&product)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
        float value, slope;
        ACTIVATION::value_and_slope(g[i], value, slope);
        const float factor = ACTIVATION::factor(u[i]);
        product[i] = value * factor;
        g[i] = dy[i] * factor * slope;
        u[i] = ACTIVATION::through(u[i], dy[i] * value);
    }
}

template <int V> DEVICE void gated_row(T *y, const T *gate, const T *up, int f) {
    const int count = f / V, stride = gridDim.y * blockDim.x;
    for (int base = blockIdx.y * blockDim.x + threadIdx.x; base < count; base += AT_ONCE * stride) {
        Pack<T, V> gates[AT_ONCE], ups[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int c = base + k * stride;
            if (c < count) {
                gates[k] = Pack<T, V>::load_streaming(gate + c * V);
                ups[k] = Pack<T, V>::load_streaming(up + c * V);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int c = base + k * stride;
            if (c >= count) break;
            float g[V], u[V];
            gates[k].unpack(g), ups[k].unpack(u);
            gated_values(g, u);
            Pack<T, V>::pack(g).store(y + c * V);
        }
    }
}

// y [n, f] at row stride y_stride (elements); gate, up at theirs. y may be gate or up where that is dense.
// grid (n, 1); with few rows (n, ceil(f / 4096)) fills the device; block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256)
gated(T *y, long long y_stride, const T *gate, const T *up, long long gate_stride, long long up_stride,
      long long n, int f) {
    const bool vectors =
        f % 8 == 0 && y_stride % 8 == 0 && gate_stride % 8 == 0 && up_stride % 8 == 0 && aligned16(y, gate, up);
    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        T *y_row = y + row * y_stride;
        const T *gate_row = gate + row * gate_stride, *up_row = up + row * up_stride;
        if (vectors) gated_row<8>(y_row, gate_row, up_row, f);
        else gated_row<1>(y_row, gate_row, up_row, f);
    }
}

template <int V>
DEVICE void gated_backward_row(T *dgate, T *dup, const T *gate, const T *up, const T *dy, T *y, int f) {
    const int count = f / V, stride = gridDim.y * blockDim.x;
    for (int base = blockIdx.y * blockDim.x + threadIdx.x; base < count; base += AT_ONCE * stride) {
        Pack<T, V> gates[AT_ONCE], ups[AT_ONCE], dys[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int c = base + k * stride;
            if (c < count) {
                gates[k] = Pack<T, V>::load_streaming(gate + c * V);
                ups[k] = Pack<T, V>::load_streaming(up + c * V);
                dys[k] = Pack<T, V>::load_streaming(dy + c * V);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int c = base + k * stride;
            if (c >= count) break;
            float g[V], u[V], d[V], product[V];
            gates[k].unpack(g), ups[k].unpack(u), dys[k].unpack(d);
            gated_gradients(g, u, d, product);
            Pack<T, V>::pack(g).store(dgate + c * V);
            Pack<T, V>::pack(u).store(dup + c * V);
            if (y != nullptr) Pack<T, V>::pack(product).store(y + c * V);
        }
    }
}

// dgate, dup: rows at row stride d_stride, may be gate and up themselves; gate, up at their strides; dy and y at
// y_stride. y [n, f] may be null; else it receives a(gate) * up, and may be dy.
// grid (n, 1); with few rows (n, ceil(f / 4096)); block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256)
gated_backward(T *dgate, T *dup, long long d_stride, const T *gate, const T *up, long long gate_stride,
               long long up_stride, const T *dy, T *y, long long y_stride, long long n, int f) {
    const bool vectors = f % 8 == 0 && y_stride % 8 == 0 && d_stride % 8 == 0 && gate_stride % 8 == 0 && up_stride % 8 == 0 &&
                         aligned16(dgate, dup, gate, up, dy, y);
    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        T *dgate_row = dgate + row * d_stride, *dup_row = dup + row * d_stride;
        const T *gate_row = gate + row * gate_stride, *up_row = up + row * up_stride, *dy_row = dy + row * y_stride;
        T *y_row = y != nullptr ? y + row * y_stride : nullptr;
        if (vectors) gated_backward_row<8>(dgate_row, dup_row, gate_row, up_row, dy_row, y_row, f);
        else gated_backward_row<1>(dgate_row, dup_row, gate_row, up_row, dy_row, y_row, f);
    }
}
