/* Simulated devices, for `stress.c` and for the library of the tests in Python (`fake_device.c`).
 *
 * A device has one stream; its context and its stream are its address. A thread of its own does what is queued there, in
 * order and late, or not at all while it is paused. A function refuses or fails its n-th call if it was told to. The file
 * that includes this one defines `fail`. What no caller may do is a failure: a copy on another stream than that of the
 * current context, an event that is recorded again before it has passed, memory that is given back while a copy needs it.
 */
#define COPY_REFUSED 801
#define EVENT_FAILED 719
#define CREATE_REFUSED 2
#define PIN_REFUSED 712
#define CONTEXT_REFUSED 201

static void fail(const char *what, long one, long two);
#define REQUIRE(condition, one, two) \
    do { \
        if (!(condition)) fail(#condition, (long)(one), (long)(two)); \
    } while (0)

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static uint64_t below(uint64_t *state, uint64_t limit) { return next_random(state) % limit; }
static bool chance(uint64_t *state, unsigned percent) { return below(state, 100) < percent; }
static void pause_us(uint64_t us) {
    const struct timespec time = {0, (long)us * 1000};
    nanosleep(&time, NULL);
}

struct device;
typedef struct event {
    struct device *device;
    int num_pending;
    bool failed, is_alive;
} event;
typedef struct operation {
    event *event; /* to pass; NULL: a copy */
    char *target;
    const char *source;
    size_t nbytes;
    struct operation *next;
} operation;
typedef struct device {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    operation *first, *last; /* `first` may be under way */
    uint64_t num_copies;     /* that were queued */
    bool is_ended, is_paused;
    int steps; /* operations that may run nevertheless */
    uint64_t random;
    unsigned max_delay_us;
    int copies_until_refused, events_until_failed, creations_until_refused, contexts_until_refused; /* 0: never */
    bool pin_refused;
    pthread_t thread;
} device;

#define NUM_DEVICES 2
static device devices[NUM_DEVICES];
static _Thread_local device *current;
static int64_t pinned_bytes;
static bool any_lost, unpin_is_held, unpin_waits;
typedef struct pin {
    device *device;
    char *memory;
    size_t nbytes;
} pin;
static pin pins[4096];
static pthread_mutex_t pins_lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_due(int *until) { return *until > 0 && --*until == 0; }

static void *device_run(void *argument) {
    device *const self = argument;
    pthread_mutex_lock(&self->lock);
    while (true) {
        while ((self->first == NULL || (self->is_paused && self->steps == 0)) && !self->is_ended) pthread_cond_wait(&self->changed, &self->lock);
        operation *const one = self->first;
        if (one == NULL) break;
        const uint64_t delay = self->max_delay_us == 0 ? 0 : below(&self->random, self->max_delay_us);
        pthread_mutex_unlock(&self->lock);
        if (delay > 0) pause_us(delay);
        if (one->event == NULL) {
            const size_t half = one->nbytes / 2;
            memcpy(one->target, one->source, half);
            if (delay > 20) pause_us(delay / 4);
            memcpy(one->target + half, one->source + half, one->nbytes - half);
        }
        pthread_mutex_lock(&self->lock);
        if (one->event != NULL) one->event->num_pending -= 1;
        self->first = one->next;
        self->steps -= self->steps > 0;
        if (self->first == NULL) self->last = NULL;
        free(one);
        pthread_cond_broadcast(&self->changed);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

static void queue(device *on, operation what) {
    operation *const one = malloc(sizeof *one);
    REQUIRE(one != NULL, 0, 0);
    *one = what;
    one->next = NULL;
    if (on->last != NULL)
        on->last->next = one;
    else
        on->first = one;
    on->last = one;
    pthread_cond_broadcast(&on->changed);
}

/* Whether a copy that is queued refers to some memory. */
static bool refers(device *on, const char *memory, size_t nbytes) {
    bool found = false;
    pthread_mutex_lock(&on->lock);
    for (const operation *one = on->first; one != NULL && !found; one = one->next)
        found = one->event == NULL && ((one->source < memory + nbytes && memory < one->source + one->nbytes) ||
                                       (one->target < memory + nbytes && memory < one->target + one->nbytes));
    pthread_mutex_unlock(&on->lock);
    return found;
}

static int fake_make_current(void *context) {
    device *const one = context;
    pthread_mutex_lock(&one->lock);
    const bool refused = is_due(&one->contexts_until_refused);
    pthread_mutex_unlock(&one->lock);
    if (refused) { /* memory that was to be released then is kept until the process ends */
        __atomic_store_n(&any_lost, true, __ATOMIC_RELAXED);
        return CONTEXT_REFUSED;
    }
    current = one;
    return 0;
}

static int fake_copy(uint64_t target, const void *source, size_t nbytes, void *stream) {
    device *const on = stream;
    REQUIRE(on == current, 0, 0);
    REQUIRE(nbytes > 0, 0, 0);
    pthread_mutex_lock(&on->lock);
    const bool refused = is_due(&on->copies_until_refused);
    on->num_copies += !refused;
    if (!refused) queue(on, (operation){NULL, (char *)(uintptr_t)target, source, nbytes, NULL});
    pthread_mutex_unlock(&on->lock);
    return refused ? COPY_REFUSED : 0;
}

static int fake_copy_to_host(void *target, uint64_t source, size_t nbytes, void *stream) {
    return fake_copy((uint64_t)(uintptr_t)target, (const void *)(uintptr_t)source, nbytes, stream);
}

static int fake_copy_on_device(uint64_t target, uint64_t source, size_t nbytes, void *stream) {
    return fake_copy(target, (const void *)(uintptr_t)source, nbytes, stream);
}

static int fake_event_create(void **made, unsigned flags) {
    (void)flags;
    REQUIRE(current != NULL, 0, 0);
    pthread_mutex_lock(&current->lock);
    const bool refused = is_due(&current->creations_until_refused);
    pthread_mutex_unlock(&current->lock);
    if (refused) return CREATE_REFUSED;
    event *const one = calloc(1, sizeof *one);
    REQUIRE(one != NULL, 0, 0);
    one->device = current;
    one->is_alive = true;
    *made = one;
    return 0;
}

static int fake_event_record(void *recorded, void *stream) {
    event *const one = recorded;
    device *const on = stream;
    REQUIRE(one->is_alive, 0, 0);
    if (on == NULL) return 0; /* the default stream has nothing queued: the event passes at once */
    REQUIRE(on == current && on == one->device, 0, 0);
    pthread_mutex_lock(&on->lock);
    REQUIRE(one->num_pending == 0, one->num_pending, 0); /* used again too early */
    one->num_pending += 1;
    one->failed = false;
    queue(on, (operation){.event = one});
    pthread_mutex_unlock(&on->lock);
    return 0;
}

static int fake_event_query(void *queried) {
    event *const one = queried; /* an event is found without a current context */
    REQUIRE(one->is_alive, 0, 0);
    pthread_mutex_lock(&one->device->lock);
    if (one->num_pending == 0 && !one->failed && is_due(&one->device->events_until_failed)) {
        one->failed = true; /* as a device that is lost: nothing that was queued runs behind the error */
        __atomic_store_n(&any_lost, true, __ATOMIC_RELAXED);
    }
    const int code = one->num_pending > 0 ? 600 : one->failed ? EVENT_FAILED : 0;
    pthread_mutex_unlock(&one->device->lock);
    return code;
}

static int fake_event_destroy(void *destroyed) {
    event *const one = destroyed;
    REQUIRE(one->is_alive && current == one->device, 0, 0);
    pthread_mutex_lock(&current->lock);
    REQUIRE(one->num_pending == 0, one->num_pending, 0);
    pthread_mutex_unlock(&current->lock);
    one->is_alive = false;
    free(one);
    return 0;
}

static int fake_pin(void *address, size_t nbytes, unsigned flags) {
    (void)flags;
    REQUIRE(current != NULL, 0, 0);
    if (__atomic_load_n(&current->pin_refused, __ATOMIC_RELAXED)) return PIN_REFUSED;
    pthread_mutex_lock(&pins_lock);
    size_t k = 0;
    while (k < sizeof pins / sizeof *pins && pins[k].memory != NULL) ++k;
    REQUIRE(k < sizeof pins / sizeof *pins, k, 0);
    pins[k] = (pin){current, address, nbytes};
    pinned_bytes += (int64_t)nbytes;
    pthread_mutex_unlock(&pins_lock);
    return 0;
}

static int fake_unpin(void *address) {
    while (__atomic_load_n(&unpin_is_held, __ATOMIC_ACQUIRE)) {
        __atomic_store_n(&unpin_waits, true, __ATOMIC_RELEASE);
        pause_us(500);
    }
    pthread_mutex_lock(&pins_lock);
    size_t k = 0;
    while (k < sizeof pins / sizeof *pins && pins[k].memory != address) ++k;
    REQUIRE(k < sizeof pins / sizeof *pins, k, 0); /* it is pinned */
    REQUIRE(pins[k].device == current, k, 0);
    const size_t nbytes = pins[k].nbytes;
    pins[k].memory = NULL;
    pinned_bytes -= (int64_t)nbytes;
    pthread_mutex_unlock(&pins_lock);
    for (int d = 0; d < NUM_DEVICES; ++d) REQUIRE(!refers(&devices[d], address, nbytes), d, 0);
    return 0;
}

static int fake_error_text(int code, const char **text) {
    *text = code == COPY_REFUSED ? "copy refused" : "another error";
    return 0;
}

static const stio_driver driver = {
    .make_current = fake_make_current,
    .copy = fake_copy,
    .copy_to_host = fake_copy_to_host,
    .copy_on_device = fake_copy_on_device,
    .event_create = fake_event_create,
    .event_record = fake_event_record,
    .event_query = fake_event_query,
    .event_destroy = fake_event_destroy,
    .pin = fake_pin,
    .unpin = fake_unpin,
    .error_text = fake_error_text,
    .not_ready = 600,
};

static void device_start(device *one, uint64_t random, unsigned max_delay_us) {
    pthread_mutex_init(&one->lock, NULL);
    pthread_cond_init(&one->changed, NULL);
    one->random = random;
    one->max_delay_us = max_delay_us;
    REQUIRE(pthread_create(&one->thread, NULL, device_run, one) == 0, 0, 0);
}
