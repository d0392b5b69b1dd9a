// Sums over the rows of a matrix, by column, of y [* x * rstd of the row]. A workgroup takes 64 columns and a piece of the rows; the pieces are summed by a
// second launch with one piece.
struct P { rows: u32, width: u32, y_row: u32, y_at: u32, x_row: u32, x_at: u32, piece: u32 }
var<immediate> p: P;
@binding(_) var<storage, READ> y: array<f32>;
#if PRODUCT
@binding(_) var<storage, READ> x: array<f32>;
@binding(_) var<storage, READ> rstds: array<f32>;
#end
@binding(_) var<storage, read_write> sums: array<f32>;

var<workgroup> partial: array<f32, 256>;

@compute @workgroup_size(64, 4)
fn main(@builtin(local_invocation_id) thread: vec3<u32>, @builtin(workgroup_id) group: vec3<u32>) {
    let column = group.x * 64u + thread.x;
    let start = group.y * p.piece;
    let end = min(start + p.piece, p.rows);
    var sum = 0.0;
    if (column < p.width) {
        for (var row = start + thread.y; row < end; row += 4u) {
            var value = y[p.y_at + row * p.y_row + column];
#if PRODUCT
            value *= x[p.x_at + row * p.x_row + column] * rstds[row];
#end
            sum += value;
        }
    }
    partial[thread.y * 64u + thread.x] = sum;
    workgroupBarrier();
    if (thread.y == 0u && column < p.width) {
        sums[group.y * p.width + column] = partial[thread.x] + partial[64u + thread.x] + partial[128u + thread.x] + partial[192u + thread.x];
    }
}
