package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// The sender's side of large transfers; transfer.go has the protocol.
//
// Memory is open to the peer from the offer until the peer says that it is
// done, exactly the bytes of the transfer, to this connection only (expose).
// Write waits for that, as the memory is its caller's. ReadFrom offers scratch
// and goes on, and so do queued sends, whose memory is lent for as long as it takes.

// transferSender is what a connection knows of the transfers that it sends.
type transferSender struct {
	mode     transferMode
	last     uint32                   // ID of the latest
	live     ring.Ring[*sendTransfer] // those that are not over, oldest first
	grants   ring.Ring[grant]         // to be answered by RDMA Write, oldest first
	writing  int                      // RDMA Writes under way
	wrote    time.Time                // when the last one was done
	withdraw *sendTransfer            // the peer is to be told that it ends
}

// trim gives back what the lists have grown by.
func (o *transferSender) trim() {
	o.live.Trim()
	o.grants.Trim()
}

// sendTransfer is one transfer.
type sendTransfer struct {
	id       uint32
	p        []byte
	open     ibv.MR              // p, for the peer to read
	source   regmem.Registration // p, for this side's device
	chunk    *regmem.Chunk       // where p lies, if it is ours
	detached bool                // no call waits for it: it is scratch's, or a queued send's
	granted  int                 // bytes that the peer has asked for, written or not
	writing  int                 // RDMA Writes under way
	moved    int                 // bytes that the peer has, as far as this side knows
	message  bool                // it is WriteMsg's
	ended    bool                // withdrawn
	done     bool                // the peer wants no more of it
	over     bool                // and its memory is in use no more
}

// wanted reports whether there is something left to be granted memory for.
func (o *sendTransfer) wanted() bool { return o.granted < len(o.p) }

// index is where a transfer stands among those that live, -1 if it does not.
func (o *transferSender) index(id uint32) int {
	if o.live.Len() > 0 {
		if i := id - (*o.live.At(0)).id; i < uint32(o.live.Len()) {
			return int(i)
		}
	}
	return -1
}

// grant is memory of the peer's for n bytes of a transfer.
type grant struct {
	o    *sendTransfer
	addr uint64
	key  uint32
	at   int // of the transfer's bytes, which
	n    int
}

// closeMemory takes the memory back, once. Scratch that the device may still use is
// lost.
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

// hasControl reports whether nextSenderControl has something.
func (o *transferSender) hasControl() bool { return o.grants.Len() > 0 || o.withdraw != nil }
