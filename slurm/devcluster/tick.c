/* Makes the slurmctld of a devcluster look at time limits every DEVCLUSTER_TICK seconds.
 *
 * slurmctld compares difftime() with a compiled-in period of 30 s before it checks limits, warning
 * signals and the end of a preemption's grace. Preloaded into that one process, this difftime()
 * makes 30 s pass in DEVCLUSTER_TICK s. The limits themselves are compared as plain numbers, so a
 * job still gets its full minutes: only the grain of the check becomes finer.
 */
#include <stdlib.h>
#include <time.h>

static double scale = 1.0;

__attribute__((constructor)) static void read_tick(void)
{
    const char *text = getenv("DEVCLUSTER_TICK");
    double tick = text ? strtod(text, NULL) : 0.0;

    if (tick > 0.0)
        scale = 30.0 / tick;
}

double difftime(time_t later, time_t earlier)
{
    return (double)(later - earlier) * scale;
}
