/* A GPT-2 in C, and the twelve lines by which gpt-duet speaks to it.

   cc -O2 -DFAULT=0 my_gpt.c -o my_gpt -lm
   gpt-duet check "exec:./my_gpt model.bin"

   model.bin is what `gpt-duet convert --to flat` writes. FAULT plants one of
   five faults, for the tests: 1 mask, 2 scale, 3 head order, 4 position,
   5 the norm's eps. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAULT
#define FAULT 0
#endif

static int V, T, L, H, C, F; /* vocabulary, positions, layers, heads, widths */
static float eps;
static float *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *projw, *projb;
static float *ln2w, *ln2b, *fcw, *fcb, *outw, *outb, *lnfw, *lnfb, *head;

/* Keys and values of a text: (layers, positions, width). */
typedef struct { float *k, *v; int seen; } Cache;

static int dumping, binary;

static void write_numbers(const float *x, int count) {
    if (binary) {
        fwrite(&count, 4, 1, stdout);
        fwrite(x, 4, count, stdout);
        return;
    }
    for (int i = 0; i < count; i++)
        printf(i ? " %.9g" : "%.9g", x[i]);
    printf("\n");
}

static void dump(const char *name, int layer, const float *x, int n, int width) {
    if (!dumping) return;
    if (layer < 0) printf("array %s %dx%d\n", name, n, width);
    else printf("array layer %d %s %dx%d\n", layer, name, n, width);
    write_numbers(x, n * width);
}

static void linear(float *y, const float *x, const float *w, const float *b,
                   int n, int in, int out) {
    for (int t = 0; t < n; t++)
        for (int o = 0; o < out; o++) {
            float sum = b ? b[o] : 0;
            for (int i = 0; i < in; i++) sum += w[o * in + i] * x[t * in + i];
            y[t * out + o] = sum;
        }
}

static void norm(float *y, const float *x, const float *w, const float *b, int n) {
    for (int t = 0; t < n; t++, x += C, y += C) {
        float mean = 0, variance = 0;
        for (int i = 0; i < C; i++) mean += x[i] / C;
        for (int i = 0; i < C; i++) variance += (x[i] - mean) * (x[i] - mean) / C;
        float scale = 1 / sqrtf(variance + (FAULT == 5 ? 1e-3f : eps));
        for (int i = 0; i < C; i++) y[i] = (x[i] - mean) * scale * w[i] + b[i];
    }
}

/* Where a feature of the query (0), key (1) or value (2) is in a row of qkv. */
static int place(int part, int i) {
    int size = C / H;
    if (FAULT == 3) return (i / size * 3 + part) * size + i % size;
    return part * C + i;
}

/* Each head of each new position attends to what the cache has up to it. */
static void attend(float *y, const float *qkv, Cache *c, int layer, int n) {
    int size = C / H, last = c->seen + n;
    const float *k = c->k + layer * T * C, *v = c->v + layer * T * C;
    float scale = 1 / sqrtf(FAULT == 2 ? C : size);
    for (int t = 0; t < n; t++)
        for (int h = 0; h < H; h++) {
            const float *q = qkv + t * 3 * C + place(0, h * size);
            float *out = y + t * C + h * size;
            int end = FAULT == 1 ? last : c->seen + t + 1;
            float p[end], most = -INFINITY, total = 0;
            for (int u = 0; u < end; u++) {
                p[u] = 0;
                for (int i = 0; i < size; i++)
                    p[u] += q[i] * k[u * C + h * size + i];
                p[u] *= scale;
                most = fmaxf(most, p[u]);
            }
            for (int u = 0; u < end; u++) total += p[u] = expf(p[u] - most);
            memset(out, 0, size * sizeof(float));
            for (int u = 0; u < end; u++)
                for (int i = 0; i < size; i++)
                    out[i] += p[u] / total * v[u * C + h * size + i];
        }
}

static void forward(const int *ids, int n, Cache *c) {
    static float *x, *a, *wide, *scores;
    if (!x) {
        x = malloc(T * C * 4), a = malloc(T * C * 4);
        wide = malloc(T * (3 * C > F ? 3 * C : F) * 4), scores = malloc(T * V * 4);
    }
    for (int t = 0; t < n; t++)
        for (int i = 0; i < C; i++) {
            int at = c->seen + t;
            if (FAULT == 4) at = at ? at - 1 : 0;
            x[t * C + i] = wte[ids[t] * C + i] + wpe[at * C + i];
        }
    dump("embed", -1, x, n, C);
    for (int l = 0; l < L; l++) {
        norm(a, x, ln1w + l * C, ln1b + l * C, n);
        dump("ln_1", l, a, n, C);
        linear(wide, a, qkvw + l * 3 * C * C, qkvb + l * 3 * C, n, C, 3 * C);
        dump("qkv", l, wide, n, 3 * C);
        for (int t = 0; t < n; t++) {
            int at = (l * T + c->seen + t) * C;
            for (int i = 0; i < C; i++) {
                c->k[at + i] = wide[t * 3 * C + place(1, i)];
                c->v[at + i] = wide[t * 3 * C + place(2, i)];
            }
        }
        attend(a, wide, c, l, n);
        dump("attended", l, a, n, C);
        linear(wide, a, projw + l * C * C, projb + l * C, n, C, C);
        for (int i = 0; i < n * C; i++) x[i] += wide[i];
        dump("after attention", l, x, n, C);
        norm(a, x, ln2w + l * C, ln2b + l * C, n);
        dump("ln_2", l, a, n, C);
        linear(wide, a, fcw + l * F * C, fcb + l * F, n, C, F);
        for (int i = 0; i < n * F; i++) {
            float u = wide[i];
            wide[i] = u / 2 * (1 + tanhf(0.7978845608f * (u + 0.044715f * u * u * u)));
        }
        dump("gelu", l, wide, n, F);
        linear(a, wide, outw + l * C * F, outb + l * C, n, F, C);
        for (int i = 0; i < n * C; i++) x[i] += a[i];
        dump("block", l, x, n, C);
    }
    c->seen += n;
    norm(a, x, lnfw, lnfb, n);
    dump("ln_f", -1, a, n, C);
    linear(scores, a, head, NULL, n, C, V);
    dump("logits", -1, scores, n, V);
    if (!dumping) write_numbers(scores, n * V);
}

static float *take(float **numbers, long count) {
    float *array = *numbers;
    *numbers += count;
    return array;
}

static void load(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f || fscanf(f, "gpt-duet-flat %d %d %d %d %d %d %*s %f", &V, &T, &L,
                     &H, &C, &F, &eps) != 7) {
        fprintf(stderr, "%s is not a flat file\n", path);
        exit(3);
    }
    fgetc(f);
    long count = (2L * V + T + 2) * C + L * (4L * C * C + 2L * C * F + 9L * C + F);
    float *n = malloc(count * 4);
    if (fread(n, 4, count, f) != (size_t)count) exit(4);
    wte = take(&n, V * C), wpe = take(&n, T * C);
    ln1w = take(&n, L * C), ln1b = take(&n, L * C);
    qkvw = take(&n, L * 3 * C * C), qkvb = take(&n, L * 3 * C);
    projw = take(&n, L * C * C), projb = take(&n, L * C);
    ln2w = take(&n, L * C), ln2b = take(&n, L * C);
    fcw = take(&n, L * F * C), fcb = take(&n, L * F);
    outw = take(&n, L * C * F), outb = take(&n, L * C);
    lnfw = take(&n, C), lnfb = take(&n, C), head = take(&n, V * C);
    fclose(f);
}

static Cache empty(void) {
    return (Cache){malloc(L * T * C * 4), malloc(L * T * C * 4), 0};
}

int main(int count, char **given) {
    load(count > 1 ? given[1] : "model.bin");
    binary = count > 2 && !strcmp(given[2], "--binary");
    Cache plain = empty(), kept = empty();
    char *line = malloc(1 << 20);
    int *ids = malloc((1 << 19) * sizeof(int));
    /* the protocol: */
    printf("cache dump block_size=%d%s\n", T, binary ? " binary" : "");
    while (fgets(line, 1 << 20, stdin)) {
        char *at = line + strcspn(line, "0123456789-\n"), *end;
        int n = 0, bad = 0, feeds = *line == 'f';
        for (; ids[n] = strtol(at, &end, 10), end != at; at = end, n++)
            bad |= ids[n] < 0 || ids[n] >= V;
        if (*line == 'r') { kept.seen = 0; continue; }
        dumping = *line == 'd', plain.seen = 0;
        bad |= n + (feeds ? kept.seen : 0) > T;
        if (bad) binary ? exit(5) : printf("error at most %d ids below %d\n", T, V);
        else forward(ids, n, feeds ? &kept : &plain);
        if (dumping) printf("end\n");
        fflush(stdout);
    }
    return 0;
}
