// What the adapters of a group sum of its input and of the gradient of its outputs, in one pass over each. Compiled after low_rank.cu.
// Trade-off: blocks of narrow modules have idle columns.

typedef Walk<1, 2, 0, 1> Input;
typedef Walk<1, 64 / RANKS, 1, 1> OutputGradient;

DEVICE const Adapter &adapter_of_chunk(const Adapters &adapters, int chunk) {
    int m = adapters.count - 1;
    while (chunk < adapters.of[m].first_chunk) --m;
    return adapters.of[m];
}

// y = x [n, width], both at row strides, and x Aᵀ of one adapter. Launch: grid (chunks, parts of the tokens); the rest as `walk` has it.
KERNEL __launch_bounds__(32 * WARPS, 1)
copy_low_rank(T *y, long long y_stride, const T *x, long long x_stride, float *low_parts, Adapters adapters, int n) {
    const Rows inputs[1] = {{x, x_stride}};
    walk<Input>(inputs, adapters.of, blockIdx.x, adapters, low_parts, nullptr, n,
                [&](const Values (&in)[1], Values (&out)[1], long long row, int column, bool inside) {
                    out[0] = in[0];
                    if (inside) out[0].store(y + row * y_stride + column);
                });
}

// d_low = dy (s B) and dB = dyᵀ low. dy [n, columns of all adapters] at a row stride. Launch: grid (chunks, parts of the tokens); the rest as
// `walk` has it.
KERNEL __launch_bounds__(32 * WARPS, 1)
output_gradient_pass(float *low_parts, float *parts, Adapters adapters, const T *dy, long long dy_stride, int n) {
    const Adapter &adapter = adapter_of_chunk(adapters, blockIdx.x);
    const Rows inputs[1] = {{dy + adapter.first_column, dy_stride}};
    walk<OutputGradient>(inputs, &adapter, blockIdx.x - adapter.first_chunk, adapters, low_parts, parts, n,
                         [](const Values (&in)[1], Values (&out)[1], long long, int, bool) { out[0] = in[0]; });
}
