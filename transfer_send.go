package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// This file has the state of the transfers that a connection sends. transfer.go has their
// messages, write_transfer.go the calls that send by them, and transfer_progress.go handles
// the peer's answers.
//
// With RDMA Reads, the peer has access to the data from the offer until the transfer is
// over. The access is to exactly these bytes, and for this connection only (Expose). Write
// waits until the transfer is over, because the memory is its caller's. ReadFrom sends from
// chunks and does not wait. The caller of QueueMsg leaves the memory to the connection
// until its PendingMessage is done.

// transferSender is the transfers that a connection sends. It knows of the connection only
// whom to wake. Conn.mu guards it.
type transferSender struct {
	writers *cqwait.Group  // writers are woken when a transfer is over.
	wait    *cqwait.Waiter // wait has the leader, who may wait for a transfer too.

	mode TransferMode             // mode is how the data moves.
	last uint32                   // last is the ID of the latest transfer.
	live ring.Ring[*sendTransfer] // live has the transfers that are not done, oldest first.

	// grants has the memory grants to be answered, oldest first.
	grants ring.Ring[memoryGrant]

	writing int       // writing counts the RDMA Writes that have not completed.
	wrote   time.Time // wrote is when the last RDMA Write completed.

	// withdraw is the transfer whose withdrawal is to be sent, or nil.
	withdraw *sendTransfer
}

// trim frees the memory that the lists have grown by.
func (out *transferSender) trim() {
	out.live.Trim()
	out.grants.Trim()
}

// sendTransfer is a transfer that a connection sends.
type sendTransfer struct {
	id uint32
	p  []byte // p is the data.

	// open is the registration of p for the peer's RDMA Reads, or nil.
	open ibv.MR

	source regmem.Registration // source is the registration of p for RDMA Writes of this side.
	chunk  *regmem.Chunk       // chunk is the chunk that p lies in, or nil.

	// detached is set if ReadFrom or a queued send has begun the transfer.
	detached bool

	granted int  // granted is how many bytes the peer has granted memory for.
	writing int  // writing counts the transfer's RDMA Writes that have not completed.
	moved   int  // moved is how many bytes the peer has, as far as this side knows.
	message bool // message is set if the data belongs to a message of the program's.
	ended   bool // ended is set when the transfer was withdrawn.
	done    bool // done is set when the peer wants no more of the transfer.
	over    bool // over is set when the transfer is done and its memory is not in use.
}

// wantsGrant reports whether there are bytes that the peer has not granted memory for.
func (o *sendTransfer) wantsGrant() bool { return o.granted < len(o.p) }

// index returns the position of a transfer in live, or -1.
func (out *transferSender) index(id uint32) int {
	if out.live.Len() > 0 {
		if i := id - (*out.live.At(0)).id; i < uint32(out.live.Len()) {
			return int(i)
		}
	}
	return -1
}

// memoryGrant is the peer's memory for a part of a transfer.
type memoryGrant struct {
	o    *sendTransfer // o is the transfer.
	addr uint64
	key  uint32
	at   int // at is the offset of the first byte in the transfer.
	n    int // n is the length in bytes.
}

// closeMemory ends the registration of the data, and releases the chunk that the data lies
// in. If the registration cannot be closed, the chunk is never used again, because the
// device may still use it. A second call does nothing.
func (o *sendTransfer) closeMemory() {
	var err error
	if o.open != nil {
		err = o.open.Close()
		o.open = nil
	} else {
		err = o.source.Close()
	}
	if o.chunk != nil && err == nil {
		o.chunk.Release()
	}
	o.chunk = nil
}

// hasControl reports whether nextControl has a message to send.
func (out *transferSender) hasControl() bool { return out.grants.Len() > 0 || out.withdraw != nil }
