/* A store that costs next to nothing: enough of S3 for every client measured here.
 *
 *     server ROOT SPOOL [CERTIFICATE KEY]
 *
 * Listens on two free ports of loopback, http and (with a certificate) TLS, and prints them; ends when its input does.
 * One thread per connection.
 * Bodies of uploads are discarded where they arrive (MSG_TRUNC), except in the bucket "keep" and below ".keepstep/" (but
 * for packs, which are files' bytes like others): those become files in SPOOL, to be read back. The files in ROOT are
 * the objects bench/src/<name>.
 * Answers are sent by sendfile, over TLS by SSL_write.
 *
 * It verifies CRC64NVME of bodies up to 64 KiB, which is what a client's probe sends, and believes it of larger ones:
 * to compute it would cost the client nothing and the server the core that the client shares with it.
 * /__rate/N limits what is received to N bytes per second, of all connections together; 0, the beginning: no limit.
 * /__stats answers what was counted since /__stats/reset, and which checks came with the bodies. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KIB 1024L
#define CHECKED_BYTES (64 * KIB)
#define PIECE_BYTES (256 * KIB)
#define KEY_BYTES 1400
#define MOST_PARTS 10000

static const char *spool;
static SSL_CTX *tls;

/* ---- what is counted ---- */

enum check { BY_MD5, BY_CRC32, BY_CRC32C, BY_CRC64NVME, BY_SHA1, BY_SHA256, BY_XXHASH, BY_SIGNATURE, CHECKS };
static const char *const check_names[CHECKS] = {"md5",  "crc32",  "crc32c", "crc64nvme",
                                                "sha1", "sha256", "xxhash", "signed"};
static struct {
    long requests, connections, bytes_in, bytes_out, bodies, checked[CHECKS], first_request_ns;
} counted;

#define COUNT(field, amount) __atomic_fetch_add(&counted.field, (amount), __ATOMIC_RELAXED)

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* ---- a store of limited rate ---- */

#define THROTTLED_BYTES (128 * KIB)
/* A server that was not given a processor for so long makes up for it, so that its rate is what was asked. */
#define CATCH_UP_NS 50000000L

static long bytes_per_second, free_at_ns;

/* Return when so many bytes, and all that came before them, could have been received at the rate. */
static void pay(ssize_t count) {
    static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
    if (!bytes_per_second) return;
    pthread_mutex_lock(&turn);
    long now = now_ns();
    if (free_at_ns < now - CATCH_UP_NS) free_at_ns = now - CATCH_UP_NS;
    free_at_ns += count * 1000000000L / bytes_per_second;
    long wait = free_at_ns - now;
    pthread_mutex_unlock(&turn);
    struct timespec pause = {wait / 1000000000L, wait % 1000000000L};
    if (wait > 0) nanosleep(&pause, NULL);
}

/* ---- text that grows ---- */

struct text {
    char *data;
    size_t size, room;
};

static void append(struct text *text, const char *format, ...) {
    for (;;) {
        va_list arguments;
        va_start(arguments, format);
        size_t room = text->room - text->size;
        size_t needed = (size_t)vsnprintf(text->data ? text->data + text->size : NULL, room, format, arguments);
        va_end(arguments);
        if (needed < room) {
            text->size += needed;
            return;
        }
        text->room = (text->room + needed) * 2 + 1024;
        text->data = realloc(text->data, text->room);
    }
}

/* ---- objects, by key; they are never freed, since a GET may still read one that was deleted ---- */

struct segment {
    char *path; /* NULL: the bytes were discarded */
    long size;
};

struct object {
    char *key; /* bucket/key */
    char etag[24];
    long size;
    time_t modified;
    int segment_count;
    struct segment *segments;
};

struct upload {
    struct upload *next;
    char *key;
    long id;
    struct segment parts[MOST_PARTS + 1];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct object **objects; /* sorted by key */
static size_t object_count, object_room;
static struct upload *uploads;
static long last_number;

static long next_number(void) { return __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED); }

/* The first place whose key is not less than `key`. Under the lock. */
static size_t place_of(const char *key) {
    size_t low = 0, high = object_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(objects[middle]->key, key) < 0) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct object *find_locked(const char *key) {
    size_t place = place_of(key);
    return place < object_count && !strcmp(objects[place]->key, key) ? objects[place] : NULL;
}

static struct object *find(const char *key) {
    pthread_mutex_lock(&lock);
    struct object *object = find_locked(key);
    pthread_mutex_unlock(&lock);
    return object;
}

/* NULL if it must be absent and is not. `segments` becomes the object's. */
static struct object *store(const char *key, struct segment *segments, int count, int if_absent) {
    struct object *object = calloc(1, sizeof *object);
    object->key = strdup(key);
    /* No MD5, and not of its form: no client takes it for one. */
    snprintf(object->etag, sizeof object->etag, "%016lx-%d", next_number(), count);
    object->modified = time(NULL);
    object->segments = segments;
    object->segment_count = count;
    for (int i = 0; i < count; i++) object->size += segments[i].size;
    pthread_mutex_lock(&lock);
    size_t place = place_of(key);
    int exists = place < object_count && !strcmp(objects[place]->key, key);
    if (exists && if_absent) {
        object = NULL;
    } else {
        if (!exists) {
            if (object_count == object_room) {
                object_room = object_room * 2 + 1024;
                objects = realloc(objects, object_room * sizeof *objects);
            }
            memmove(objects + place + 1, objects + place, (object_count - place) * sizeof *objects);
            object_count++;
        }
        objects[place] = object;
    }
    pthread_mutex_unlock(&lock);
    return object;
}

static void forget(const char *key) {
    pthread_mutex_lock(&lock);
    if (find_locked(key)) {
        size_t place = place_of(key);
        memmove(objects + place, objects + place + 1, (--object_count - place) * sizeof *objects);
    }
    pthread_mutex_unlock(&lock);
}

static struct upload **find_upload_locked(long id) {
    struct upload **link = &uploads;
    while (*link && (*link)->id != id) link = &(*link)->next;
    return link;
}

/* The upload, no longer among the open ones; NULL if there is none. */
static struct upload *take_upload(long id) {
    pthread_mutex_lock(&lock);
    struct upload **link = find_upload_locked(id), *upload = *link;
    if (upload) *link = upload->next;
    pthread_mutex_unlock(&lock);
    return upload;
}

/* ---- connections ---- */

struct connection {
    int socket;
    SSL *ssl;
    char buffer[64 * KIB];
    size_t begin, end;
    char *piece; /* PIECE_BYTES of room */
};

static ssize_t receive(struct connection *connection, void *data, size_t size) {
    ssize_t count;
    do count = connection->ssl ? SSL_read(connection->ssl, data, (int)size) : recv(connection->socket, data, size, 0);
    while (count < 0 && !connection->ssl && errno == EINTR);
    if (count > 0) COUNT(bytes_in, count);
    return count;
}

static int transmit(struct connection *connection, const char *data, size_t size, int flags) {
    while (size) {
        ssize_t count = connection->ssl ? SSL_write(connection->ssl, data, (int)size)
                                        : send(connection->socket, data, size, flags);
        if (count < 0 && !connection->ssl && errno == EINTR) continue;
        if (count <= 0) return -1;
        COUNT(bytes_out, count);
        data += count;
        size -= (size_t)count;
    }
    return 0;
}

/* A line without its end; its length, or -1 when the peer is gone. */
static int read_line(struct connection *connection, char *line, int room) {
    for (int length = 0;;) {
        while (connection->begin < connection->end) {
            char letter = connection->buffer[connection->begin++];
            if (letter == '\n') {
                if (length && line[length - 1] == '\r') length--;
                line[length] = 0;
                return length;
            }
            if (length < room - 1) line[length++] = letter;
        }
        ssize_t count = receive(connection, connection->buffer, sizeof connection->buffer);
        if (count <= 0) return -1;
        connection->begin = 0;
        connection->end = (size_t)count;
    }
}

/* ---- requests ---- */

struct request {
    char method[16], key[KEY_BYTES], query[8192];
    char checksum_header[200], crc64nvme[64], if_match[64];
    long content_length, decoded_length, range_first, range_last;
    int chunked, framed, expects_continue, closes, ranged, if_absent, checked[CHECKS];
    int bucket_length;
};

static void decode(char *text) {
    char *to = text;
    for (; *text; text++) {
        if (*text == '%' && text[1] && text[2]) {
            char digits[3] = {text[1], text[2], 0};
            *to++ = (char)strtol(digits, NULL, 16);
            text += 2;
        } else {
            *to++ = *text;
        }
    }
    *to = 0;
}

/* The value of a query's parameter, decoded; 0 if it is not there. */
static int parameter(const struct request *request, const char *name, char *value, size_t room) {
    size_t length = strlen(name);
    for (const char *at = request->query; at && *at; at = strchr(at, '&') ? strchr(at, '&') + 1 : NULL) {
        if (strncmp(at, name, length) || !strchr("=&", at[length])) continue;
        const char *begin = at + length + (at[length] == '=');
        snprintf(value, room, "%.*s", (int)strcspn(begin, "&"), begin);
        decode(value);
        return 1;
    }
    return 0;
}

static long number_parameter(const struct request *request, const char *name, long otherwise) {
    char value[64];
    return parameter(request, name, value, sizeof value) ? atol(value) : otherwise;
}

static int has_parameter(const struct request *request, const char *name) {
    return number_parameter(request, name, -1) != -1;
}

static void note_checksum(struct request *request, const char *algorithm) {
    if (!strncasecmp(algorithm, "xxhash", 6)) request->checked[BY_XXHASH] = 1;
    for (int check = BY_CRC32; check < BY_XXHASH; check++)
        if (!strcasecmp(algorithm, check_names[check])) request->checked[check] = 1;
}

static void note_header(struct request *request, const char *name, char *value) {
    static const char prefix[] = "x-amz-checksum-";
    size_t prefix_length = sizeof prefix - 1;
    if (!strcasecmp(name, "content-length")) request->content_length = atol(value);
    else if (!strcasecmp(name, "transfer-encoding")) request->chunked = !!strcasestr(value, "chunked");
    else if (!strcasecmp(name, "content-encoding")) request->framed = !!strcasestr(value, "aws-chunked");
    else if (!strcasecmp(name, "x-amz-decoded-content-length")) request->decoded_length = atol(value);
    else if (!strcasecmp(name, "expect")) request->expects_continue = 1;
    else if (!strcasecmp(name, "connection")) request->closes = !!strcasestr(value, "close");
    else if (!strcasecmp(name, "if-none-match")) request->if_absent = 1;
    else if (!strcasecmp(name, "if-match")) snprintf(request->if_match, sizeof request->if_match, "%s", value);
    else if (!strcasecmp(name, "content-md5")) request->checked[BY_MD5] = 1;
    else if (!strcasecmp(name, "x-amz-content-sha256"))
        request->checked[BY_SIGNATURE] = !strstr(value, "UNSIGNED-PAYLOAD");
    else if (!strcasecmp(name, "range"))
        request->ranged = sscanf(value, "bytes=%ld-%ld", &request->range_first, &request->range_last) >= 1;
    else if (!strcasecmp(name, "x-amz-trailer") && !strncasecmp(value, prefix, prefix_length))
        note_checksum(request, value + prefix_length);
    else if (!strncasecmp(name, prefix, prefix_length)) {
        note_checksum(request, name + prefix_length);
        if (!strcasecmp(name + prefix_length, "crc64nvme"))
            snprintf(request->crc64nvme, sizeof request->crc64nvme, "%s", value);
        if (strcasecmp(name + prefix_length, "type") && strcasecmp(name + prefix_length, "algorithm"))
            snprintf(request->checksum_header, sizeof request->checksum_header, "%.60s: %.100s\r\n", name, value);
    }
}

/* 0, or -1 when there is no further request. */
static int read_request(struct connection *connection, struct request *request) {
    char line[16 * KIB], target[8192];
    memset(request, 0, sizeof *request);
    request->decoded_length = -1;
    request->range_last = -1;
    int length = read_line(connection, line, sizeof line);
    if (length <= 0 || sscanf(line, "%15s %8191s", request->method, target) != 2) return -1;
    while ((length = read_line(connection, line, sizeof line)) > 0) {
        char *colon = strchr(line, ':');
        if (!colon) continue;
        *colon++ = 0;
        note_header(request, line, colon + strspn(colon, " "));
    }
    char *question = strchr(target, '?');
    if (question) {
        *question++ = 0;
        snprintf(request->query, sizeof request->query, "%s", question);
    }
    decode(target);
    snprintf(request->key, sizeof request->key, "%s", target + (*target == '/'));
    request->bucket_length = (int)strcspn(request->key, "/");
    return length;
}

/* Whether it names an object, and not a bucket alone. */
static int names_object(const struct request *request) {
    return request->key[request->bucket_length] && request->key[request->bucket_length + 1];
}

/* ---- answers ---- */

static int reply(struct connection *connection, int status, const char *headers, const char *body, size_t size) {
    static const char form[] = "HTTP/1.1 %d %s\r\nServer: bench\r\nx-amz-request-id: 1\r\n%sContent-Length: %zu\r\n\r\n";
    char head[2048];
    const char *reason = status < 300 ? "OK" : "Refused";
    int length = snprintf(head, sizeof head, form, status, reason, headers, size);
    if (transmit(connection, head, (size_t)length, body && size ? MSG_MORE : 0)) return -1;
    return body && size ? transmit(connection, body, size, 0) : 0;
}

static int reply_text(struct connection *connection, int status, const char *format, ...) {
    char body[2 * KEY_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(body, sizeof body, format, arguments);
    va_end(arguments);
    return reply(connection, status, "Content-Type: application/xml\r\n", body, (size_t)size);
}

static int refuse(struct connection *connection, const struct request *request, int status, const char *code) {
    if (!strcmp(request->method, "HEAD")) return reply(connection, status, "", NULL, 0);
    return reply_text(connection, status, "<Error><Code>%s</Code><Message>%s</Message></Error>", code, code);
}

static void stamp(time_t moment, const char *form, char *into, size_t room) {
    struct tm parts;
    strftime(into, room, form, gmtime_r(&moment, &parts));
}

static int send_segment(struct connection *connection, const struct segment *segment, off_t offset, long size) {
    int file = open(segment->path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    int result = 0;
    while (size > 0 && !result) {
        if (connection->ssl) {
            ssize_t count = pread(file, connection->piece, size < PIECE_BYTES ? (size_t)size : PIECE_BYTES, offset);
            result = count > 0 ? transmit(connection, connection->piece, (size_t)count, 0) : -1;
            offset += count;
            size -= count;
        } else {
            ssize_t count = sendfile(connection->socket, file, &offset, (size_t)size);
            if (count > 0) COUNT(bytes_out, count);
            result = count > 0 ? 0 : -1;
            size -= count;
        }
    }
    close(file);
    return result;
}

static int get_object(struct connection *connection, const struct request *request) {
    struct object *object = find(request->key);
    if (!object) return refuse(connection, request, 404, "NoSuchKey");
    char headers[512], modified[64], etag[40];
    snprintf(etag, sizeof etag, "\"%s\"", object->etag);
    if (*request->if_match && strcmp(request->if_match, etag))
        return refuse(connection, request, 412, "PreconditionFailed");
    long first = 0, last = object->size - 1;
    if (request->ranged) {
        first = request->range_first < 0 ? object->size + request->range_first : request->range_first;
        if (request->range_last >= 0 && request->range_last < last) last = request->range_last;
        if (first < 0) first = 0;
        if (first > last) return refuse(connection, request, 416, "InvalidRange");
    }
    stamp(object->modified, "%a, %d %b %Y %H:%M:%S GMT", modified, sizeof modified);
    int used = snprintf(headers, sizeof headers, "ETag: %s\r\nLast-Modified: %s\r\nAccept-Ranges: bytes\r\n%s", etag,
                        modified, "Content-Type: binary/octet-stream\r\n");
    if (request->ranged)
        snprintf(headers + used, sizeof headers - (size_t)used, "Content-Range: bytes %ld-%ld/%ld\r\n", first, last,
                 object->size);
    int head = !strcmp(request->method, "HEAD");
    for (int i = 0; i < object->segment_count && !head; i++)
        if (!object->segments[i].path) return refuse(connection, request, 500, "BytesWereDiscarded");
    if (reply(connection, request->ranged ? 206 : 200, headers, NULL, (size_t)(last - first + 1))) return -1;
    long position = 0;
    for (int i = 0; i < object->segment_count && !head; position += object->segments[i++].size) {
        long size = object->segments[i].size;
        long from = first > position ? first - position : 0;
        long to = last - position < size - 1 ? last - position : size - 1;
        if (from <= to && send_segment(connection, object->segments + i, from, to - from + 1)) return -1;
    }
    return 0;
}

/* ---- bodies ---- */

static uint64_t crc64nvme_table[256];

static void make_crc64nvme_table(void) {
    for (unsigned byte = 0; byte < 256; byte++) {
        uint64_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = value & 1 ? value >> 1 ^ 0x9a6c9329ac4bc9b5u : value >> 1;
        crc64nvme_table[byte] = value;
    }
}

static int is_crc64nvme(const char *expected, const char *data, size_t size) {
    uint64_t value = ~0ul;
    for (size_t i = 0; i < size; i++) value = crc64nvme_table[(value ^ (unsigned char)data[i]) & 255] ^ value >> 8;
    value = ~value;
    unsigned char bytes[8], encoded[16];
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(value >> (56 - 8 * i));
    EVP_EncodeBlock(encoded, bytes, sizeof bytes);
    return !strcmp((char *)encoded, expected);
}

/* Take exactly `size` bytes off the connection: into `file`, or away. `whole`, if not NULL, has room for them. */
static int take_bytes(struct connection *connection, long size, int file, char *whole) {
    while (size > 0) {
        char *data = connection->buffer + connection->begin;
        ssize_t count = (ssize_t)(connection->end - connection->begin);
        if (count) {
            if (count > size) count = size;
            connection->begin += (size_t)count;
        } else if (file < 0 && !whole && !connection->ssl) {
            long most = bytes_per_second && size > THROTTLED_BYTES ? THROTTLED_BYTES : size;
            count = recv(connection->socket, NULL, (size_t)most, MSG_TRUNC);
            if (count < 0 && errno == EINTR) continue;
            if (count > 0) COUNT(bytes_in, count);
        } else {
            data = connection->piece;
            count = receive(connection, data, size < PIECE_BYTES ? (size_t)size : PIECE_BYTES);
        }
        if (count <= 0) return -1;
        pay(count);
        if (whole) whole = (char *)mempcpy(whole, data, (size_t)count);
        if (file >= 0 && write(file, data, (size_t)count) != count) return -1;
        size -= count;
    }
    return 0;
}

enum taken { TAKEN, WRONG_CHECKSUM, BROKEN };

/* The body of an upload becomes a segment. */
static enum taken take_body(struct connection *connection, const struct request *request, struct segment *segment) {
    int is_ours = strstr(request->key, "/.keepstep/") && !strstr(request->key, "/.keepstep/pack-");
    int keeps = !strncmp(request->key, "keep/", 5) || is_ours;
    int file = -1;
    char path[512], whole[CHECKED_BYTES], line[256];
    *segment = (struct segment){.path = NULL, .size = request->content_length};
    if (keeps && !request->framed && !request->chunked) {
        snprintf(path, sizeof path, "%s/%ld", spool, next_number());
        file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file < 0) return BROKEN;
        segment->path = strdup(path);
    }
    int failed = 0;
    long size = request->content_length;
    int checked = *request->crc64nvme && size <= CHECKED_BYTES && !request->chunked && !request->framed;
    if (request->chunked) {
        long chunk = 0;
        do {
            failed = read_line(connection, line, sizeof line) < 0;
            chunk = failed ? 0 : strtol(line, NULL, 16);
            segment->size += chunk;
            failed |= chunk && take_bytes(connection, chunk, file, NULL);
            if (chunk) failed |= read_line(connection, line, sizeof line) < 0;
        } while (chunk && !failed);
        int length = failed ? -1 : 1; /* of the trailers, up to the empty line */
        while (length > 0) length = read_line(connection, line, sizeof line);
        failed |= length < 0;
    } else {
        failed = take_bytes(connection, size, file, checked ? whole : NULL);
    }
    if (request->decoded_length >= 0) segment->size = request->decoded_length;
    if (file >= 0) close(file);
    if (failed) return BROKEN;
    if (segment->size > CHECKED_BYTES) {
        COUNT(bodies, 1);
        for (int check = 0; check < CHECKS; check++) COUNT(checked[check], request->checked[check]);
    }
    return checked && !is_crc64nvme(request->crc64nvme, whole, (size_t)size) ? WRONG_CHECKSUM : TAKEN;
}

/* ---- operations ---- */

static int put(struct connection *connection, const struct request *request, struct segment segment) {
    char headers[400];
    long part = number_parameter(request, "partNumber", 0);
    if (!names_object(request)) return reply(connection, 200, "", NULL, 0);
    if (part > 0) {
        pthread_mutex_lock(&lock);
        struct upload *upload = *find_upload_locked(number_parameter(request, "uploadId", 0));
        if (upload && part <= MOST_PARTS) upload->parts[part] = segment;
        pthread_mutex_unlock(&lock);
        if (!upload) return refuse(connection, request, 404, "NoSuchUpload");
        snprintf(headers, sizeof headers, "ETag: \"%016lx\"\r\n%s", next_number(), request->checksum_header);
        return reply(connection, 200, headers, NULL, 0);
    }
    struct segment *segments = malloc(sizeof segment);
    *segments = segment;
    struct object *object = store(request->key, segments, 1, request->if_absent);
    if (!object) return refuse(connection, request, 412, "PreconditionFailed");
    snprintf(headers, sizeof headers, "ETag: \"%s\"\r\n%s", object->etag, request->checksum_header);
    return reply(connection, 200, headers, NULL, 0);
}

static int create_upload(struct connection *connection, const struct request *request) {
    struct upload *upload = calloc(1, sizeof *upload);
    upload->key = strdup(request->key);
    upload->id = next_number();
    long id = upload->id;
    pthread_mutex_lock(&lock);
    upload->next = uploads;
    uploads = upload;
    pthread_mutex_unlock(&lock);
    return reply_text(connection, 200,
                      "<InitiateMultipartUploadResult><Bucket>%.*s</Bucket><Key>%s</Key><UploadId>%ld</UploadId>"
                      "</InitiateMultipartUploadResult>",
                      request->bucket_length, request->key, request->key + request->bucket_length + 1, id);
}

static int complete_upload(struct connection *connection, const struct request *request) {
    struct upload *upload = take_upload(number_parameter(request, "uploadId", 0));
    if (!upload) return refuse(connection, request, 404, "NoSuchUpload");
    int count = 0;
    struct segment *segments = calloc(MOST_PARTS, sizeof *segments);
    for (int part = 1; part <= MOST_PARTS; part++)
        if (upload->parts[part].size) segments[count++] = upload->parts[part];
    free(upload->key);
    free(upload);
    struct object *object = store(request->key, segments, count, request->if_absent);
    if (!object) return refuse(connection, request, 412, "PreconditionFailed");
    return reply_text(connection, 200,
                      "<CompleteMultipartUploadResult><Location>http://127.0.0.1/%s</Location><Bucket>%.*s</Bucket>"
                      "<Key>%s</Key><ETag>\"%s\"</ETag></CompleteMultipartUploadResult>",
                      request->key, request->bucket_length, request->key, request->key + request->bucket_length + 1,
                      object->etag);
}

static int abort_upload(struct connection *connection, const struct request *request) {
    struct upload *upload = take_upload(number_parameter(request, "uploadId", 0));
    if (!upload) return refuse(connection, request, 404, "NoSuchUpload");
    free(upload->key);
    free(upload);
    return reply(connection, 204, "", NULL, 0);
}

/* The bucket and a slash, and then the value of a parameter: what keys of `objects` are compared with. */
static void whole_key(const struct request *request, const char *name, char *key) {
    char value[KEY_BYTES / 2] = "";
    parameter(request, name, value, sizeof value);
    snprintf(key, KEY_BYTES, "%.*s/%s", request->bucket_length, request->key, value);
}

static int list_objects(struct connection *connection, const struct request *request) {
    struct text rows = {0}, page = {0};
    char prefix[KEY_BYTES], after[KEY_BYTES] = "", modified[64];
    whole_key(request, "prefix", prefix);
    /* Of both versions of the operation. */
    static const char *const markers[] = {"continuation-token", "start-after", "marker"};
    for (size_t i = 0; i < sizeof markers / sizeof *markers && !*after; i++)
        if (has_parameter(request, markers[i])) whole_key(request, markers[i], after);
    long most = number_parameter(request, "max-keys", 1000), count = 0;
    if (most > 1000) most = 1000;
    append(&rows, "%s", "");
    pthread_mutex_lock(&lock);
    size_t place = place_of(prefix), bucket_length = (size_t)request->bucket_length + 1;
    if (*after && strcmp(after, prefix) >= 0) {
        place = place_of(after);
        if (place < object_count && !strcmp(objects[place]->key, after)) place++;
    }
    const char *last = "";
    int truncated = 0;
    for (; place < object_count && !strncmp(objects[place]->key, prefix, strlen(prefix)); place++) {
        const struct object *object = objects[place];
        if ((truncated = count == most)) break;
        stamp(object->modified, "%Y-%m-%dT%H:%M:%S.000Z", modified, sizeof modified);
        last = object->key + bucket_length;
        append(&rows,
               "<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>\"%s\"</ETag><Size>%ld</Size>"
               "<StorageClass>STANDARD</StorageClass></Contents>",
               last, modified, object->etag, object->size);
        count++;
    }
    pthread_mutex_unlock(&lock);
    append(&page,
           "<ListBucketResult><Name>%.*s</Name><Prefix>%s</Prefix><KeyCount>%ld</KeyCount><MaxKeys>%ld</MaxKeys>"
           "<IsTruncated>%s</IsTruncated>",
           request->bucket_length, request->key, prefix + bucket_length, count, most, truncated ? "true" : "false");
    if (truncated)
        append(&page, "<NextContinuationToken>%s</NextContinuationToken><NextMarker>%s</NextMarker>", last, last);
    append(&page, "%s</ListBucketResult>", rows.data);
    int result = reply(connection, 200, "Content-Type: application/xml\r\n", page.data, page.size);
    free(rows.data);
    free(page.data);
    return result;
}

static int list_uploads(struct connection *connection, const struct request *request) {
    struct text page = {0};
    char prefix[KEY_BYTES];
    whole_key(request, "prefix", prefix);
    append(&page, "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>");
    pthread_mutex_lock(&lock);
    for (struct upload *upload = uploads; upload; upload = upload->next)
        if (!strncmp(upload->key, prefix, strlen(prefix)))
            append(&page,
                   "<Upload><Key>%s</Key><UploadId>%ld</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>",
                   upload->key + request->bucket_length + 1, upload->id);
    pthread_mutex_unlock(&lock);
    append(&page, "</ListMultipartUploadsResult>");
    int result = reply(connection, 200, "Content-Type: application/xml\r\n", page.data, page.size);
    free(page.data);
    return result;
}

static int stats(struct connection *connection, const struct request *request) {
    struct text body = {0};
    if (!strcmp(request->key, "__stats/reset")) memset(&counted, 0, sizeof counted);
    append(&body,
           "{\"requests\": %ld, \"connections\": %ld, \"bytes_in\": %ld, \"bytes_out\": %ld, \"bodies\": %ld, "
           "\"first_request_ns\": %ld, \"checks\": {",
           counted.requests, counted.connections, counted.bytes_in, counted.bytes_out, counted.bodies,
           counted.first_request_ns);
    for (int check = 0; check < CHECKS; check++)
        append(&body, "%s\"%s\": %ld", check ? ", " : "", check_names[check], counted.checked[check]);
    append(&body, "}}\n");
    int result = reply(connection, 200, "Content-Type: application/json\r\n", body.data, body.size);
    free(body.data);
    return result;
}

/* 0 if the connection can serve another request. */
static int serve(struct connection *connection) {
    struct request request;
    if (read_request(connection, &request)) return -1;
    if (!strncmp(request.key, "__stats", 7)) return stats(connection, &request);
    if (!strncmp(request.key, "__rate/", 7)) {
        bytes_per_second = atol(request.key + 7);
        return stats(connection, &request);
    }
    long none = 0;
    if (!counted.first_request_ns)
        __atomic_compare_exchange_n(&counted.first_request_ns, &none, now_ns(), 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    COUNT(requests, 1);
    if (request.expects_continue && transmit(connection, "HTTP/1.1 100 Continue\r\n\r\n", 25, 0)) return -1;
    int result;
    if (!strcmp(request.method, "PUT")) {
        struct segment segment;
        enum taken taken = take_body(connection, &request, &segment);
        if (taken == BROKEN) return -1;
        result = taken == TAKEN ? put(connection, &request, segment)
                                : refuse(connection, &request, 400, "BadDigest");
    } else if (take_bytes(connection, request.content_length, -1, NULL)) {
        return -1;
    } else if (!strcmp(request.method, "POST")) {
        result = strncmp(request.query, "uploads", 7) ? complete_upload(connection, &request)
                                                      : create_upload(connection, &request);
    } else if (!strcmp(request.method, "DELETE")) {
        if (has_parameter(&request, "uploadId")) return abort_upload(connection, &request);
        forget(request.key);
        result = reply(connection, 204, "", NULL, 0);
    } else if (names_object(&request)) {
        result = get_object(connection, &request);
    } else if (!strcmp(request.method, "HEAD")) {
        result = reply(connection, 200, "", NULL, 0);
    } else if (has_parameter(&request, "location")) {
        result = reply_text(connection, 200, "<LocationConstraint></LocationConstraint>");
    } else {
        result = has_parameter(&request, "uploads") ? list_uploads(connection, &request)
                                                    : list_objects(connection, &request);
    }
    return result || request.closes ? -1 : 0;
}

struct arrival {
    int socket, secure;
};

static void *attend(void *argument) {
    struct arrival arrival = *(struct arrival *)argument;
    free(argument);
    struct connection *connection = calloc(1, sizeof *connection);
    connection->socket = arrival.socket;
    connection->piece = malloc(PIECE_BYTES);
    int one = 1;
    setsockopt(arrival.socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    /* What waits in our buffers would be neither stored nor taken back by whoever sent it. */
    int small = THROTTLED_BYTES;
    if (bytes_per_second) setsockopt(arrival.socket, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    int ready = 1;
    if (arrival.secure) {
        connection->ssl = SSL_new(tls);
        SSL_set_fd(connection->ssl, arrival.socket);
        ready = SSL_accept(connection->ssl) > 0;
    }
    COUNT(connections, 1);
    while (ready && !serve(connection)) {}
    if (connection->ssl) SSL_free(connection->ssl);
    close(arrival.socket);
    free(connection->piece);
    free(connection);
    return NULL;
}

static int listen_on_loopback(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (void *)&address, size) || listen(listener, 512) ||
        getsockname(listener, (void *)&address, &size)) {
        perror("listen");
        exit(1);
    }
    *port = ntohs(address.sin_port);
    return listener;
}

struct door {
    int listener, secure;
};

static void *accept_all(void *argument) {
    struct door door = *(struct door *)argument;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 512 * KIB);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (;;) {
        int socket = accept4(door.listener, NULL, NULL, SOCK_CLOEXEC);
        if (socket < 0) continue;
        struct arrival *arrival = malloc(sizeof *arrival);
        *arrival = (struct arrival){.socket = socket, .secure = door.secure};
        pthread_t thread;
        if (pthread_create(&thread, &attributes, attend, arrival)) {
            close(socket);
            free(arrival);
        }
    }
    return NULL;
}

static void add_sources(const char *root) {
    DIR *directory = opendir(root);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        char path[1024], key[512];
        struct stat status;
        snprintf(path, sizeof path, "%s/%s", root, entry->d_name);
        if (stat(path, &status) || !S_ISREG(status.st_mode)) continue;
        snprintf(key, sizeof key, "bench/src/%s", entry->d_name);
        struct segment *segment = malloc(sizeof *segment);
        *segment = (struct segment){.path = strdup(path), .size = status.st_size};
        store(key, segment, 1, 0);
    }
    if (directory) closedir(directory);
}

static void prepare_tls(const char *certificate, const char *key) {
    tls = SSL_CTX_new(TLS_server_method());
    /* One cipher, and the one that S3 prefers: else each client would choose another. */
    if (SSL_CTX_use_certificate_chain_file(tls, certificate) <= 0 ||
        SSL_CTX_use_PrivateKey_file(tls, key, SSL_FILETYPE_PEM) <= 0 ||
        SSL_CTX_set_ciphersuites(tls, "TLS_AES_128_GCM_SHA256") <= 0 ||
        SSL_CTX_set_cipher_list(tls, "ECDHE-ECDSA-AES128-GCM-SHA256") <= 0) {
        fprintf(stderr, "the certificate cannot be used\n");
        exit(1);
    }
    SSL_CTX_set_read_ahead(tls, 1);
    SSL_CTX_set_default_read_buffer_len(tls, 128 * KIB);
}

int main(int count, char **arguments) {
    if (count != 3 && count != 5) {
        fprintf(stderr, "usage: %s ROOT SPOOL [CERTIFICATE KEY]\n", *arguments);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    make_crc64nvme_table();
    spool = arguments[2];
    add_sources(arguments[1]);
    int port, secure_port = 0;
    struct door plain = {.listener = listen_on_loopback(&port)}, secure = {.secure = 1};
    pthread_t thread;
    pthread_create(&thread, NULL, accept_all, &plain);
    if (count == 5) {
        prepare_tls(arguments[3], arguments[4]);
        secure.listener = listen_on_loopback(&secure_port);
        pthread_create(&thread, NULL, accept_all, &secure);
    }
    printf("%d %d\n", port, secure_port);
    fflush(stdout);
    char nothing;
    while (read(0, &nothing, 1) > 0) {} /* until whoever started it is gone */
    return 0;
}
