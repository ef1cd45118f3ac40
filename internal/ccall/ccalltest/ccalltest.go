//go:build linux && cgo

// Package ccalltest has C functions for the tests of package ccall. Test files cannot have
// C functions of their own.
package ccalltest

/*
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct sum { int64_t a, b, sum; int aligned; };

int ct_sum(void *arg)
{
	struct sum *s = arg;
	int64_t vector[2] __attribute__((aligned(16)));
	s->aligned = (uintptr_t)__builtin_frame_address(0) % 16 == 0 && (uintptr_t)vector % 16 == 0;
	s->sum = s->a + s->b;
	return -7;
}

// ct_deep uses as many bytes of stack as arg points to.
int __attribute__((noinline)) ct_deep(void *arg)
{
	size_t n = *(size_t *)arg;
	volatile char bytes[n];
	for (size_t i = 0; i < n; i += 512)
		bytes[i] = 1;
	return bytes[0];
}

// ct_spin computes for as many nanoseconds as arg points to.
int ct_spin(void *arg)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	int64_t end = t.tv_sec * 1000000000LL + t.tv_nsec + *(int64_t *)arg;
	do
		clock_gettime(CLOCK_MONOTONIC, &t);
	while (t.tv_sec * 1000000000LL + t.tv_nsec < end);
	return 0;
}

// ct_registers leaves something in every register that C may change.
int ct_registers(void *arg)
{
	(void)arg;
#if defined(__x86_64__)
	__asm__ volatile("pcmpeqd %%xmm0, %%xmm0\n pcmpeqd %%xmm15, %%xmm15\n"
			 "mov $-1, %%rcx\n mov %%rcx, %%rdx\n mov %%rcx, %%rsi\n mov %%rcx, %%rdi\n"
			 "mov %%rcx, %%r8\n mov %%rcx, %%r9\n mov %%rcx, %%r10\n mov %%rcx, %%r11\n"
			 ::: "xmm0", "xmm15", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11");
#elif defined(__aarch64__)
	__asm__ volatile("mov x1, #-1\n mov x2, x1\n mov x8, x1\n mov x9, x1\n mov x15, x1\n mov x16, x1\n"
			 "mov x17, x1\n fmov d0, x1\n fmov d31, x1\n"
			 ::: "x1", "x2", "x8", "x9", "x15", "x16", "x17", "d0", "d31");
#endif
	return 0;
}

int ct_errno(void *arg)
{
	errno = 0;
	clock_gettime(*(int *)arg, NULL);
	return -errno;
}

int ct_tell(void *arg)
{
	__atomic_store_n((int *)arg, 1, __ATOMIC_RELEASE);
	return 0;
}

int ct_told(void *arg)
{
	return __atomic_load_n((int *)arg, __ATOMIC_ACQUIRE);
}

int ct_crash(void *arg)
{
	return *(volatile int *)*(void **)arg;
}

// ct_crash_below crashes in a function that another one has called.
int __attribute__((noinline)) ct_crash_below(void *arg)
{
	volatile int n = ct_crash(arg);
	return n + 1;
}

// ct_overflow calls itself until its stack is used up. It has more to do after each call than to return.
int __attribute__((noinline)) ct_overflow(void *arg)
{
	volatile char bytes[256];
	bytes[0] = arg != NULL;
	return ct_overflow(arg) + bytes[0];
}
*/
import "C"

import "unsafe"

// Sum is the argument of AddUp.
type Sum = C.struct_sum

var (
	// AddUp sets sum and aligned of a Sum, and returns -7. aligned is set if the stack is
	// aligned.
	AddUp = unsafe.Pointer(C.ct_sum)
	// Deep uses as many bytes of stack as its argument, a size_t, and returns 1.
	Deep = unsafe.Pointer(C.ct_deep)
	// Spin computes for as many nanoseconds as its argument, an int64_t.
	Spin = unsafe.Pointer(C.ct_spin)
	// Registers changes every register that C may change.
	Registers = unsafe.Pointer(C.ct_registers)
	// Errno returns the negative errno of clock_gettime for the clock that its argument
	// names.
	Errno = unsafe.Pointer(C.ct_errno)
	// Tell sets the int that its argument points to. Told returns that int.
	Tell = unsafe.Pointer(C.ct_tell)
	Told = unsafe.Pointer(C.ct_told)
	// Crash reads from the address in its argument, which ends the process.
	Crash = unsafe.Pointer(C.ct_crash)
	// CrashBelow calls a function that crashes as Crash does.
	CrashBelow = unsafe.Pointer(C.ct_crash_below)
	// Overflow calls itself until the stack is used up.
	Overflow = unsafe.Pointer(C.ct_overflow)
)

// Result returns the fields that AddUp has set.
func Result(s *Sum) (sum int64, aligned bool) { return int64(s.sum), s.aligned != 0 }

// NewSum returns an argument for AddUp.
func NewSum(a, b int64) Sum { return Sum{a: C.int64_t(a), b: C.int64_t(b)} }
