// Start and end of the document of a token.
fn document(token: u32) -> vec2<u32> {
    var low = 0u;
    var high = p.documents;
    while (high - low > 1u) {
        let middle = (low + high) / 2u;
        if (u32(boundaries[middle]) <= token) { low = middle; } else { high = middle; }
    }
    return vec2<u32>(u32(boundaries[low]), u32(boundaries[low + 1u]));
}
