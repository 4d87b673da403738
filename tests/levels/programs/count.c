/* Counts, and writes restart.dat when it hears USR1: an old program that cannot be changed.
   usage: count STEPS MICROSECONDS */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static volatile sig_atomic_t asked;

static void hear(int number) { (void)number; asked = 1; }

static void save(const char *name, long step, unsigned long sum) {
    char draft[64];
    snprintf(draft, sizeof draft, "new.%s", name);
    FILE *file = fopen(draft, "w");
    if (file == NULL) exit(3);
    fprintf(file, "step %ld\nsum %lu\nend\n", step, sum);
    fclose(file);
    rename(draft, name);
}

int main(int argc, char **argv) {
    long most = argc > 1 ? atol(argv[1]) : 100, step = 0;
    unsigned long sum = 1;
    signal(SIGUSR1, hear);
    FILE *file = fopen("restart.dat", "r");
    if (file != NULL) {
        if (fscanf(file, "step %ld\nsum %lu\nend", &step, &sum) != 2) return 4;
        fclose(file);
    }
    printf("from %ld\n", step);
    fflush(stdout);
    for (; step < most; usleep(argc > 2 ? atoi(argv[2]) : 1000)) {
        sum = sum * 6364136223846793005UL + 1442695040888963407UL;
        step++;
        if (asked) {
            asked = 0;
            save("restart.dat", step, sum);
        }
    }
    save("result.dat", step, sum);
    return 0;
}
