    // Which tile of the result a workgroup computes, and which part of the inner dimension: row_tile, column_tile, part.
    let tile = group.x + group.y * 65535u;
    let part = tile / (p.tiles * p.row_tiles);
    // Workgroups that run at the same time are tiles of a square, whose rows of A and B stay in the cache.
    let place_in = tile % (p.tiles * p.row_tiles);
    let first_row = place_in / (SQUARE * p.tiles) * SQUARE;
    let square = min(p.row_tiles - first_row, SQUARE);
    let place_at = place_in % (SQUARE * p.tiles);
    let row_tile = first_row + place_at % square;
    let column_tile = place_at / square;
