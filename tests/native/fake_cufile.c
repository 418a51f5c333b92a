/* The stand-in for cuFile as a library, which takes the place of libcufile.so.0. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../stio/native/engine.h"
#include "cufile.h"
