/* Products of pairs by AMX: up to 32 rows by 32 columns of sums are four of the eight tiles, and 32 of k are a step. In assembler, because
 * not all compilers know that tiles read memory. */

INLINE void begin_16(void) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
}
INLINE void end_16(void) { __asm__ volatile("tilerelease" ::: "memory"); }

#define TILE_LOAD(tile, at, apart) __asm__ volatile("tileloadd (%0,%1,1), %%" #tile ::"r"(at), "r"(apart) : "memory")
#define TILE_STORE(tile, at, apart) __asm__ volatile("tilestored %%" #tile ", (%0,%1,1)" ::"r"(at), "r"(apart) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%" #tile ::: "memory")
#define TILE_TIMES(sum, x, y) __asm__ volatile("tdpbf16ps %%" #y ", %%" #x ", %%" #sum ::: "memory")

/* tmm0 to tmm3 are sums, tmm4 and tmm5 rows of A, tmm6 and tmm7 columns of B. */
INLINE void tile_16(const int down, const int right, int64_t steps, const char *a, int64_t apart, const char *b, float *c, int64_t ldc, int more) {
    int64_t line = ldc * (int64_t)sizeof(float), across = 128;
    float *below = c + 16 * ldc;
    const char *low = a + 16 * apart;
    if (more) {
        TILE_LOAD(tmm0, c, line);
        if (right) TILE_LOAD(tmm1, c + 16, line);
        if (down) TILE_LOAD(tmm2, below, line);
        if (down && right) TILE_LOAD(tmm3, below + 16, line);
    } else {
        TILE_ZERO(tmm0);
        if (right) TILE_ZERO(tmm1);
        if (down) TILE_ZERO(tmm2);
        if (down && right) TILE_ZERO(tmm3);
    }
    for (int64_t s = 0; s < steps; s++, a += 64, low += 64, b += 2048) {
        TILE_LOAD(tmm4, a, apart);
        TILE_LOAD(tmm6, b, across);
        TILE_TIMES(tmm0, tmm4, tmm6);
        if (right) {
            TILE_LOAD(tmm7, b + 64, across);
            TILE_TIMES(tmm1, tmm4, tmm7);
        }
        if (down) {
            TILE_LOAD(tmm5, low, apart);
            TILE_TIMES(tmm2, tmm5, tmm6);
            if (right) TILE_TIMES(tmm3, tmm5, tmm7);
        }
    }
    TILE_STORE(tmm0, c, line);
    if (right) TILE_STORE(tmm1, c + 16, line);
    if (down) TILE_STORE(tmm2, below, line);
    if (down && right) TILE_STORE(tmm3, below + 16, line);
}

/* Up to 32 rows of A against panels of B; `more`: on top of the sums that are there */
static void times_16(int64_t all, int64_t rows, int64_t n, int64_t k, Rows16 a, const char *b, float *sums, int64_t ld, int more) {
    (void)all;
    int64_t steps = up_to_16(k, KEYS_16) / KEYS_16;
    for (int64_t j = 0; j < n; j += PANEL_16, b += steps * 2048) {
        if (rows > 16 && n - j > 16)
            tile_16(1, 1, steps, a.at, a.apart, b, sums + j, ld, more);
        else if (rows > 16)
            tile_16(1, 0, steps, a.at, a.apart, b, sums + j, ld, more);
        else if (n - j > 16)
            tile_16(0, 1, steps, a.at, a.apart, b, sums + j, ld, more);
        else
            tile_16(0, 0, steps, a.at, a.apart, b, sums + j, ld, more);
    }
}
