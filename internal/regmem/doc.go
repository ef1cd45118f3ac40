// Package regmem manages memory that is registered with RDMA devices.
//
// A [Domain] is a protection domain. Where a memory key can belong to one queue pair
// (ibv.CapQPRegion), all users of a device share one Domain. On other devices a key
// opens memory to the peers of all queue pairs in its domain, and a peer can guess
// keys. There each user has a private Domain.
//
// A [Pool] of a Domain has buffers of one size for receives and sends. The buffers are
// cut from slabs. A slab is memory outside the Go heap, since the runtime would give
// pages of its heap back to the kernel while the device uses them. A slab is registered
// once.
//
// A [Memory] is memory for large reads and writes that the program has asked for or
// brought along. [Domain.Expose] registers such memory, or memory of the Go heap, for
// the peer, and [Domain.RegisterTarget] and [Domain.RegisterSource] register it for the
// device.
//
// A [Chunk] is bounce memory, through which large reads and writes from and to other
// memory pass.
//
// A [Budget] bounds the memory for receives of all users of a device.
//
// All functions and methods may be called by several goroutines at once, unless their
// comment says otherwise. No function waits, except [Memory.Free]. The calls of the
// device in which memory is registered may take long.
package regmem
