// RMSNorm of rows: y = x * rstd * (offset + w) [+ residual], and its backward. One workgroup per row; sums in f32. HALF: also a copy in float16.
#if HALF
enable f16;
#end
struct P { rows: u32, width: u32, x_row: u32, x_at: u32, w_at: u32, offset: f32, epsilon: f32, add_row: u32, add_at: u32, dy_row: u32, dy_at: u32 }
var<immediate> p: P;
@binding(_) var<storage, READ> x: array<f32>;
@binding(_) var<storage, READ> w: array<f32>;
#if BACKWARD
@binding(_) var<storage, READ> dy: array<f32>;
#end
#if ADD
@binding(_) var<storage, READ> add: array<f32>;
#end
@binding(_) var<storage, read_write> y: array<f32>;
#if SCALES
@binding(_) var<storage, read_write> rstds: array<f32>;
#end

const THREADS = 256u;
#if HALF
#use half_rows
#end
var<workgroup> sums: array<vec2<f32>, THREADS>;

fn total(thread: u32, value: vec2<f32>) -> vec2<f32> {
    sums[thread] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    return sums[0];
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let row = group.x + group.y * 65535u;
#if HALF
    if (row >= p.rows) {
        put_half(thread, row, p.rows, p.width, 0.0);
        return;
    }
    var largest = 0.0;
#else
    if (row >= p.rows) { return; }
#end
    let at = p.x_at + row * p.x_row;
    var sum = vec2<f32>();
    for (var i = thread; i < p.width; i += THREADS) {
        let value = x[at + i];
        sum.x += value * value;
#if BACKWARD
        sum.y += dy[p.dy_at + row * p.dy_row + i] * (p.offset + w[p.w_at + i]) * value;
#end
    }
    sum = total(thread, sum);
    let rstd = 1.0 / sqrt(sum.x / f32(p.width) + p.epsilon);
#if SCALES
    if (thread == 0u) { rstds[row] = rstd; }
#end
    for (var i = thread; i < p.width; i += THREADS) {
        let factor = p.offset + w[p.w_at + i];
#if BACKWARD
        let g = dy[p.dy_at + row * p.dy_row + i] * factor;
        var value = rstd * (g - x[at + i] * rstd * (sum.y * rstd / f32(p.width)));
#else
        var value = x[at + i] * rstd * factor;
#end
#if ADD
        value += add[p.add_at + row * p.add_row + i];
#end
        y[row * p.width + i] = value;
#if HALF
        largest = max(largest, abs(value));
#end
    }
#if HALF
    put_half(thread, row, p.rows, p.width, largest);
#end
}
