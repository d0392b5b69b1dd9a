// Rows by index. GATHER: y[r] = scale * x[indices[r]]. SCATTER: y[indices[r]] = x[r]; no index occurs twice.
#if HALF
enable f16;
#end
struct P { rows: u32, width: u32, x_row: u32, x_at: u32, indices_at: u32, scale: f32 }
var<immediate> p: P;
#if HALF
@binding(_) var<storage, READ> x: array<f16>;
#else
@binding(_) var<storage, READ> x: array<f32>;
#end
@binding(_) var<storage, READ> indices: array<i32>;
@binding(_) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let index = (group.x + group.y * 65535u) * 256u + thread;
    if (index >= p.rows * p.width) { return; }
    let row = index / p.width;
    let column = index % p.width;
#if GATHER
    y[index] = p.scale * f32(x[p.x_at + u32(indices[p.indices_at + row]) * p.x_row + column]);
#end
#if SCATTER
    y[u32(indices[p.indices_at + row]) * p.width + column] = f32(x[p.x_at + row * p.x_row + column]);
#end
}
