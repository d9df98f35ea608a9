/* The physical limit: what the kernel and OpenSSL need to move the same bytes, without a client around them.
 *
 *     limits MODE PORT CONNECTIONS PART_BYTES SOURCE DESTINATION FILE...
 *
 * Files of SOURCE are put to the server of server.c in parts, or fetched from there to preallocated files in DESTINATION.
 * One thread and one connection for each of CONNECTIONS; they take the next part from one counter. No checksum, no
 * signature, no retry: whatever goes wrong ends the program. With O_DIRECT what is fetched goes past the page cache, but
 * for the end of a file that fills no block. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define BUFFER_BYTES (1L << 20)
#define MOST_FILES 20000

#define BLOCK_BYTES 4096

enum mode { SENDFILE, PREAD_SEND, PREAD_SSL, RECV, SSL_RECV, RECV_DIRECT, SSL_RECV_DIRECT, MODES };
static const char *const mode_names[MODES] = {
    "sendfile", "pread+send", "pread+SSL_write", "recv+pwrite", "SSL_read+pwrite", "recv+O_DIRECT", "SSL_read+O_DIRECT"};
static enum mode mode;
static int port, file_count;
static long part_bytes, longest;
static struct {
    const char *name;
    long size;
    int source, destination, direct;
    pthread_mutex_t writing; /* the kernel's own lock of a file would spin */
} files[MOST_FILES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int next_file;
static long next_offset;

static void expect(int holds, const char *what) {
    if (holds) return;
    perror(what);
    exit(1);
}

/* 0 when every part was given out. One part of each file in turn: writers of one file wait for each other. */
static int take_part(int *file, long *offset, long *size) {
    pthread_mutex_lock(&lock);
    do {
        *file = next_file;
        *offset = next_offset;
        *size = files[next_file].size - next_offset;
        next_file = (next_file + 1) % file_count;
        if (!next_file) next_offset += part_bytes;
    } while (*size <= 0 && next_offset < longest);
    pthread_mutex_unlock(&lock);
    if (*size > part_bytes) *size = part_bytes;
    return *size > 0;
}

struct line {
    int socket;
    SSL *ssl;
};

static void send_all(struct line line, const char *data, long size, int flags) {
    while (size > 0) {
        long count = line.ssl ? SSL_write(line.ssl, data, (int)size) : send(line.socket, data, (size_t)size, flags);
        expect(count > 0, "send");
        data += count;
        size -= count;
    }
}

static long receive(struct line line, char *data, long size) {
    long count = line.ssl ? SSL_read(line.ssl, data, (int)size) : recv(line.socket, data, (size_t)size, 0);
    expect(count > 0, "recv");
    return count;
}

/* Read an answer's head into `data`, with what came of the body; returns where that begins, and its size in `extra`. */
static char *receive_head(struct line line, char *data, long room, long *extra) {
    long size = 0;
    for (;;) {
        size += receive(line, data + size, room - size);
        char *end = memmem(data, (size_t)size, "\r\n\r\n", 4);
        if (!end) continue;
        expect(!strncmp(data, "HTTP/1.1 20", 11), "the answer");
        *extra = data + size - (end + 4);
        return end + 4;
    }
}

static void upload(struct line line, int file, long offset, long size, char *buffer) {
    long extra;
    int length = snprintf(buffer, BUFFER_BYTES,
                          "PUT /bench/limits/%s.%ld HTTP/1.1\r\nHost: limits\r\nContent-Length: %ld\r\n\r\n",
                          files[file].name, offset, size);
    send_all(line, buffer, length, MSG_MORE);
    if (mode == SENDFILE) {
        while (size > 0) {
            long count = sendfile(line.socket, files[file].source, &offset, (size_t)size);
            expect(count > 0, "sendfile");
            size -= count;
        }
    } else {
        while (size > 0) {
            long count = pread(files[file].source, buffer, (size_t)(size < BUFFER_BYTES ? size : BUFFER_BYTES), offset);
            expect(count > 0, "pread");
            send_all(line, buffer, count, 0);
            offset += count;
            size -= count;
        }
    }
    receive_head(line, buffer, BUFFER_BYTES, &extra);
}

static void download(struct line line, int file, long offset, long size, char *buffer) {
    long extra;
    int length = snprintf(buffer, BUFFER_BYTES,
                          "GET /bench/src/%s HTTP/1.1\r\nHost: limits\r\nRange: bytes=%ld-%ld\r\n\r\n",
                          files[file].name, offset, offset + size - 1);
    send_all(line, buffer, length, 0);
    char *body = receive_head(line, buffer, 4096, &extra);
    memmove(buffer, body, (size_t)extra);
    while (size > 0) {
        long filled = extra, wanted = size < BUFFER_BYTES ? size : BUFFER_BYTES;
        while (filled < wanted) filled += receive(line, buffer + filled, wanted - filled);
        pthread_mutex_lock(&files[file].writing);
        int whole_blocks = mode >= RECV_DIRECT && filled % BLOCK_BYTES == 0;
        int target = whole_blocks ? files[file].direct : files[file].destination;
        expect(pwrite(target, buffer, (size_t)filled, offset) == filled, "pwrite");
        pthread_mutex_unlock(&files[file].writing);
        offset += filled;
        size -= filled;
        extra = 0;
    }
}

static void *work(void *context) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct line line = {.socket = socket(AF_INET, SOCK_STREAM, 0)};
    int one = 1;
    expect(!connect(line.socket, (void *)&address, sizeof address), "connect");
    setsockopt(line.socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (context) {
        line.ssl = SSL_new(context);
        SSL_set_fd(line.ssl, line.socket);
        expect(SSL_connect(line.ssl) > 0, "SSL_connect");
    }
    char *buffer = aligned_alloc(BLOCK_BYTES, BUFFER_BYTES);
    int file;
    long offset, size;
    while (take_part(&file, &offset, &size)) {
        if (mode < RECV) upload(line, file, offset, size, buffer);
        else download(line, file, offset, size, buffer);
    }
    close(line.socket);
    return NULL;
}

static void open_file(const char *name, const char *source, const char *destination) {
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", source, name);
    int descriptor = open(path, O_RDONLY);
    expect(descriptor >= 0 && !fstat(descriptor, &status), path);
    files[file_count].name = name;
    files[file_count].source = descriptor;
    files[file_count].size = status.st_size;
    if (status.st_size > longest) longest = status.st_size;
    if (mode >= RECV) {
        snprintf(path, sizeof path, "%s/%s", destination, name);
        descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL, 0644);
        expect(descriptor >= 0 && !posix_fallocate(descriptor, 0, status.st_size), path);
        files[file_count].destination = descriptor;
        files[file_count].direct = mode >= RECV_DIRECT ? open(path, O_WRONLY | O_DIRECT) : -1;
        expect(mode < RECV_DIRECT || files[file_count].direct >= 0, "O_DIRECT");
    }
    pthread_mutex_init(&files[file_count++].writing, NULL);
}

int main(int count, char **arguments) {
    if (count < 8 || count - 7 > MOST_FILES) {
        fprintf(stderr, "usage: %s MODE PORT CONNECTIONS PART_BYTES SOURCE DESTINATION FILE...\n", *arguments);
        return 2;
    }
    for (mode = 0; mode < MODES && strcmp(mode_names[mode], arguments[1]); mode++) {}
    expect(mode < MODES, "the mode");
    port = atoi(arguments[2]);
    int connections = atoi(arguments[3]);
    part_bytes = atol(arguments[4]);
    for (int i = 7; i < count; i++) open_file(arguments[i], arguments[5], arguments[6]);
    SSL_CTX *context = NULL;
    if (mode == PREAD_SSL || mode == SSL_RECV || mode == SSL_RECV_DIRECT) {
        context = SSL_CTX_new(TLS_client_method());
        SSL_CTX_set_read_ahead(context, 1);
        SSL_CTX_set_default_read_buffer_len(context, 128 << 10);
    }
    pthread_t threads[256];
    expect(connections > 0 && connections <= 256, "the number of connections");
    for (int i = 0; i < connections; i++) expect(!pthread_create(threads + i, NULL, work, context), "pthread_create");
    for (int i = 0; i < connections; i++) pthread_join(threads[i], NULL);
    return 0;
}
