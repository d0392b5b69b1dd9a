// The adapters of up to four modules of a group.
struct Module {
    const float *a, *b; // [rank, i] and [rows, rank]; null without
    int first_row, rows, first_rank, rank;
    float scale;
    int unused;
};

struct Modules {
    Module of[4];
    int count;
    int unused;
};
