// Values in float16, divided by a power of two, so that the largest is near 16,384: with 11 bits down to 2^-28 of that. Rows and columns are padded
// with zeros.
//
// LARGEST: only the largest of each workgroup's values. BY_ROW: a power per row, from its largest value, by a workgroup; it is written. MEASURED: one
// power, from those largest values, or from all values if they are few; it is written. RELATIVE: that of the row in other values, times `scale`. Else
// the power is `scale`, written if FACTOR. FOLDED: values are those of rows times the power of the row in other values.
#if LARGEST
#else
enable f16;
#end
struct P { rows: u32, width: u32, x_row: u32, x_at: u32, y_rows: u32, y_width: u32, largest: u32, scale: f32 }
var<immediate> p: P;
#if VECTORS
@binding(_) var<storage, READ> x: array<vec4<f32>>;
#else
@binding(_) var<storage, READ> x: array<f32>;
#end
#if GIVEN
@binding(_) var<storage, READ> given: array<f32>;
#end
#if LARGEST
@binding(_) var<storage, read_write> largest: array<f32>;
#else
#if PIECES
@binding(_) var<storage, READ> largest: array<f32>;
#end
#if FACTOR
@binding(_) var<storage, read_write> factor_of: array<f32>;
#end
@binding(_) var<storage, read_write> y: array<vec4<f16>>;
#end

const THREADS = 256u;
#if SHARES
#use largest
#end

// Four values of a row; zeros outside of it.
fn four(row: u32, column: u32) -> vec4<f32> {
    var values = vec4<f32>();
    let at = p.x_at + row * p.x_row + column;
#if VECTORS
    if (row < p.rows && column < p.width) { values = x[at / 4u]; }
#else
    for (var i = 0u; i < 4u && row < p.rows && column + i < p.width; i++) { values[i] = x[at + i]; }
#end
#if FOLDED
    values *= given[row];
#end
    return values;
}

#if SHARES
// The largest of a thread's values, from `first` on in vectors of four.
fn largest_from(first: u32, count: u32, step: u32) -> f32 {
    let across = (p.width + 3u) / 4u;
    var value = 0.0;
    for (var i = first; i < count; i += step) {
        let values = abs(four(i / across, i % across * 4u));
        value = max(value, max(max(values.x, values.y), max(values.z, values.w)));
    }
    return value;
}
#end

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let index = group.x + group.y * 65535u;
    let first = index * THREADS + thread;
#if LARGEST
    let value = largest_of(thread, largest_from(first, p.rows * ((p.width + 3u) / 4u), groups.x * THREADS));
    if (thread == 0u) { largest[group.x] = value; }
#else
    let across = p.y_width / 4u;
#if BY_ROW
    if (index >= p.y_rows) { return; }
    let of_row = (p.width + 3u) / 4u;
    let factor = power_of(largest_of(thread, largest_from(index * of_row + thread, (index + 1u) * of_row, THREADS)));
    if (thread == 0u) { factor_of[index] = factor; }
    for (var i = thread; i < across; i += THREADS) { y[index * across + i] = vec4<f16>(four(index, i * 4u) / factor); }
#else
    var factor = p.scale;
#if MEASURED
#if PIECES
    var value = 0.0;
    for (var i = thread; i < p.largest; i += THREADS) { value = max(value, largest[i]); }
#else
    let value = largest_from(thread, p.rows * ((p.width + 3u) / 4u), THREADS);
#end
    factor = power_of(largest_of(thread, value));
#end
#if FACTOR
    if (first == 0u) { factor_of[0] = factor; }
#end
    if (first >= p.y_rows * across) { return; }
    let row = first / across;
#if RELATIVE
    factor *= given[row];
#end
    y[first] = vec4<f16>(four(row, first % across * 4u) / factor);
#end
#end
}
