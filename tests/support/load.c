/* A load client that costs next to nothing: one thread, epoll, keep-alive, one request at a time per connection.
 *
 *     load PORT SECONDS CONNECTIONS:BODY_BYTES:PATH...
 *
 * Each connection asks for its PATH again and again; with a ! before it no two heads are the same. Bodies are dropped
 * in the kernel (MSG_TRUNC), unseen; of each answer the head is read, and must say 200 and BODY_BYTES. One JSON object
 * per group on stdout: answers ended, bytes of bodies, seconds (more than asked for where no answer had ended by
 * then), and the latencies' median, 99th percentile and maximum in milliseconds. Exit code 1, with one sentence on stderr, where anything is not as it should be.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEAD_BYTES 4096
#define MAX_GROUPS 8
#define PATIENCE_SECONDS 60

struct group {
    char request[1024];
    int request_bytes, number_at; /* of the digits that change, or 0 */
    long long number;
    long long body_bytes, total_bytes;
    float *latencies;
    size_t answers, room;
};

struct connection {
    int fd;
    struct group *group;
    double asked;
    char head[HEAD_BYTES];
    int head_bytes;   /* read so far; -1 once the head is through */
    long long left;   /* of the body */
};

static void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void ask(struct connection *c) {
    struct group *g = c->group;
    c->head_bytes = 0;
    c->asked = now();
    if (g->number_at) {
        char digits[17];
        snprintf(digits, sizeof digits, "%016llx", ++g->number);
        memcpy(g->request + g->number_at, digits, 16);
    }
    if (send(c->fd, g->request, g->request_bytes, MSG_NOSIGNAL) != g->request_bytes)
        die("a request could not be sent: %s", strerror(errno));
}

static void ended(struct connection *c) {
    struct group *g = c->group;
    if (g->answers == g->room) {
        g->room = g->room ? 2 * g->room : 4096;
        g->latencies = realloc(g->latencies, g->room * sizeof *g->latencies);
        if (!g->latencies)
            die("no memory");
    }
    g->latencies[g->answers++] = (float)((now() - c->asked) * 1e3);
}

/* Judges a whole head; gives how many bytes of the body came with it. */
static int judge(struct connection *c, char *end) {
    struct group *g = c->group;
    *end = 0;
    if (strncmp(c->head, "HTTP/1.1 200", 12))
        die("the answer was not 200 but: %.60s", c->head);
    char *length = strcasestr(c->head, "\ncontent-length:");
    if (!length || atoll(length + 16) != g->body_bytes)
        die("the answer has not the length that it should have");
    int with_head = c->head_bytes - (int)(end + 4 - c->head);
    c->head_bytes = -1;
    c->left = g->body_bytes - with_head;
    return with_head;
}

/* Reads what is there; 0 when the kernel has no more. */
static int advance(struct connection *c) {
    if (c->head_bytes >= 0) {
        ssize_t got = recv(c->fd, c->head + c->head_bytes, HEAD_BYTES - 1 - c->head_bytes, MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN)
            return 0;
        if (got <= 0)
            die("the connection broke in a head");
        c->head_bytes += got;
        char *end = memmem(c->head, c->head_bytes, "\r\n\r\n", 4);
        if (!end) {
            if (c->head_bytes == HEAD_BYTES - 1)
                die("a head is too long");
            return 1;
        }
        c->group->total_bytes += judge(c, end);
    } else {
        ssize_t got = recv(c->fd, NULL, c->left, MSG_TRUNC | MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN)
            return 0;
        if (got <= 0)
            die("the connection broke in a body");
        c->left -= got;
        c->group->total_bytes += got;
    }
    if (c->left == 0) {
        ended(c);
        ask(c);
        return 0; /* the next answer cannot be here yet */
    }
    return 1;
}

static int any_unanswered(const struct group *groups, int count) {
    while (count--)
        if (!groups[count].answers)
            return 1;
    return 0;
}

static int compare(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void report(struct group *g, double seconds) {
    if (!g->answers)
        die("no answer came in %.1f s", seconds);
    qsort(g->latencies, g->answers, sizeof *g->latencies, compare);
    printf("{\"answers\": %zu, \"bytes\": %lld, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f}\n",
           g->answers, g->total_bytes, seconds, g->latencies[g->answers / 2],
           g->latencies[(size_t)(0.99 * (g->answers - 1))], g->latencies[g->answers - 1]);
}

int main(int argc, char **argv) {
    static struct group groups[MAX_GROUPS];
    long long start_number = (long long)getpid() << 32; /* no head as in an earlier run */
    if (argc < 4 || argc - 3 > MAX_GROUPS)
        die("usage: load PORT SECONDS CONNECTIONS:BODY_BYTES:PATH...");
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int poll = epoll_create1(0);
    for (int i = 3; i < argc; i++) {
        struct group *g = &groups[i - 3];
        int count, at;
        if (sscanf(argv[i], "%d:%lld:%n", &count, &g->body_bytes, &at) != 2)
            die("not CONNECTIONS:BODY_BYTES:PATH: %s", argv[i]);
        int changes = argv[i][at] == '!';
        g->request_bytes = snprintf(g->request, sizeof g->request, "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%s\r\n%s\r\n",
                                    argv[i] + at + changes, argv[1], changes ? "Request-Id: 0123456789abcdef\r\n" : "");
        if (changes)
            g->number_at = g->request_bytes - 20, g->number = start_number;
        while (count--) {
            struct connection *c = calloc(1, sizeof *c);
            int one = 1;
            c->group = g;
            c->fd = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(c->fd, (struct sockaddr *)&address, sizeof address))
                die("no connection to port %s: %s", argv[1], strerror(errno));
            setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
            epoll_ctl(poll, EPOLL_CTL_ADD, c->fd, &event);
            ask(c);
        }
    }
    double start = now(), end = start + atof(argv[2]), time;
    while ((time = now()) < end || (time < start + PATIENCE_SECONDS && any_unanswered(groups, argc - 3))) {
        struct epoll_event events[64];
        int count = epoll_wait(poll, events, 64, 100);
        for (int i = 0; i < count; i++)
            while (advance(events[i].data.ptr)) {
            }
    }
    for (int i = 3; i < argc; i++)
        report(&groups[i - 3], time - start);
    return 0;
}
