package rdmanet

import (
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// A Buffer is memory for large reads and writes, from [Alloc] or
// [RegisterMemory]. What is written from there, or read into there, the device
// moves without a copy; a connection registers the memory when it first needs it.
// All methods may be called by several goroutines at once.
type Buffer struct {
	mem regmem.Memory
}

// Alloc returns a Buffer of n bytes, all zero, outside the Go heap, where the
// garbage collector neither counts nor frees it: Free must be called. From 2 MiB
// on the system's huge pages are used if there are any. n below 1 matches
// syscall.EINVAL, memory that the system refuses syscall.ENOMEM.
func Alloc(n int) (*Buffer, error) {
	b := new(Buffer)
	if err := b.mem.Alloc(n); err != nil {
		return nil, fmt.Errorf("rdmanet: Alloc of %d bytes: %w", n, err)
	}
	return b, nil
}

// RegisterMemory returns a Buffer of memory that the application owns, a mapped
// file for instance. It must stay mapped until Free has returned, and must not
// have bytes in common with another Buffer (syscall.EINVAL).
func RegisterMemory(b []byte) (*Buffer, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("rdmanet: RegisterMemory of no bytes: %w", syscall.EINVAL)
	}
	buf := new(Buffer)
	if err := buf.mem.Register(b); err != nil {
		return nil, fmt.Errorf("rdmanet: RegisterMemory of %d bytes that are in part a Buffer already: %w", len(b), err)
	}
	return buf, nil
}

// Bytes returns the memory, nil after Free.
func (b *Buffer) Bytes() []byte { return b.mem.Bytes() }

// Free gives the memory up. The slices of Bytes must not be used any more. What
// came from Alloc goes back to the system when every call, and every queued send,
// that is still at work there has ended; the application's own memory it may unmap
// when Free returns, for which Free waits for those. Free may be called more than
// once.
//
// A call of a Conn or PacketConn that is given the memory after Free fails with an
// error that matches errno.EFAULT, for as long as the package knows the memory.
func (b *Buffer) Free() { b.mem.Free() }

// acquireDomain returns the memory of a device for a connection, to be released once.
// lasting says that shared memory outlives its last user for a second, so that a program
// that connects again and again does not map and register it each time. A provider that
// the program has brought (Config.Provider) is the program's to dispose of, and gets
// everything back as soon as its last connection and listener have been released, which
// goes on behind Close (Lingering counts those).
func acquireDomain(dev ibv.Device, lasting bool) (*regmem.Domain, error) {
	return regmem.Acquire(dev, lasting, memoryAdvice)
}

// memoryAdvice names the settings to lower where no more memory can be registered.
var memoryAdvice = regmem.Advice{Buffers: "Config.MaxReceiveCredits", Transfers: "Config.TransferMemory"}
